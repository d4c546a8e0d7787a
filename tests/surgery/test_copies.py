"""Copies and wrappers of a compacted model: whatever ``ifso.save`` writes of them can be loaded."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import ifso
from ifso.errors import RecipeError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu())


def pruned() -> Net:
    net = Net().eval()
    graph = ifso.trace(net, torch.zeros(1, 3, 8, 8))
    ifso.compact_(net, graph, {"first": torch.arange(8) % 2 == 0})
    return net


def ema(net: nn.Module) -> nn.Module:
    return pytest.importorskip("timm.utils").ModelEmaV3(net)


def ddp(net: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net)


def unpickled(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


WAYS: list[Callable[[nn.Module], nn.Module]] = [
    copy.deepcopy, copy.copy, unpickled, ema, AveragedModel, nn.DataParallel, ddp, torch.compile,
    lambda net: AveragedModel(torch.compile(nn.DataParallel(copy.deepcopy(net)))),
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.usefixtures("one_process")
def test_what_is_saved_of_a_copy_or_wrapper_can_be_loaded(way: Callable[[nn.Module], nn.Module], tmp_path: Path):
    net, x = pruned(), torch.randn(2, 3, 8, 8)
    ifso.save(way(net), tmp_path / "run")
    loaded = ifso.load(tmp_path / "run", Net().eval())
    assert torch.equal(loaded(x), net(x))
    assert ifso.recipe(loaded) == ifso.recipe(way(net)) == ifso.recipe(net)
    assert ifso.recipe(net).removed_units == 4


def test_a_copy_stays_loadable_when_its_original_is_gone_or_compacted_further(tmp_path: Path):
    net = pruned()
    copied, x = copy.deepcopy(net), torch.randn(2, 3, 8, 8)
    graph = ifso.trace(net, torch.zeros(1, 3, 8, 8))
    ifso.compact_(net, graph, {"first": torch.arange(4) > 0})
    ifso.save(copied, tmp_path / "copied")
    assert torch.equal(ifso.load(tmp_path / "copied", Net().eval())(x), copied(x))
    further = copy.deepcopy(net)
    del net
    ifso.save(further, tmp_path / "further")
    assert torch.equal(ifso.load(tmp_path / "further", Net().eval())(x), further(x))
    assert len(ifso.recipe(further).rounds) == 2


def without_recipe(net: Net) -> nn.Module:
    return torch.fx.symbolic_trace(net)


def test_the_shapes_of_a_compacted_model_without_its_recipe_are_refused(tmp_path: Path):
    net = pruned()
    other = without_recipe(net)
    with pytest.raises(RecipeError, match=r"shapes of a compacted Net but no recipe .*; give .*like=RUN") as refused:
        ifso.save(other, tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()
    with pytest.raises(RecipeError, match="no recipe"):
        ifso.recipe(other)


def test_like_gives_the_recipe_of_a_run_or_of_a_model(tmp_path: Path):
    net, x = pruned(), torch.randn(2, 3, 8, 8)
    ifso.save(net, tmp_path / "run")
    for place, like in (("folder", tmp_path / "run"), ("text", str(tmp_path / "run")), ("model", nn.DataParallel(net))):
        ifso.save(without_recipe(net), tmp_path / place, like=like)
        assert torch.equal(ifso.load(tmp_path / place, Net().eval())(x), net(x))


def test_like_is_refused_where_it_is_of_another_network(tmp_path: Path):
    ifso.save(pruned(), tmp_path / "run")
    with pytest.raises(RecipeError, match="does not lead to this Net"):
        ifso.save(Net(), tmp_path / "other", like=tmp_path / "run")
    with pytest.raises(RecipeError, match="no such file"):
        ifso.save(Net(), tmp_path / "other", like=tmp_path / "nothing")
    with pytest.raises(RecipeError, match="give one of them"):
        ifso.save(Net(), tmp_path / "other", ifso.recipe(Net()), like=tmp_path / "run")
    assert not (tmp_path / "other").exists()


def test_a_network_with_a_compacted_part_is_refused_and_the_part_named(tmp_path: Path):
    with pytest.raises(RecipeError, match="'0' of this Sequential was compacted, not the whole; save that part"):
        ifso.save(nn.Sequential(pruned(), nn.ReLU()), tmp_path / "run")


def test_a_wrapper_of_an_unpruned_network_is_saved_as_that_network(tmp_path: Path):
    net = Net()
    ifso.save(nn.DataParallel(net), tmp_path)
    assert torch.equal(ifso.load(tmp_path, Net()).first.weight, net.first.weight)
    assert ifso.recipe(nn.DataParallel(net)).rounds == ()


def test_load_refuses_a_wrapper(tmp_path: Path):
    ifso.save(pruned(), tmp_path)
    with pytest.raises(RecipeError, match="load it first, then wrap it in AveragedModel"):
        ifso.load(tmp_path, AveragedModel(Net()))


def test_an_old_copy_does_not_fit_after_its_head_was_exchanged(tmp_path: Path):
    net = copy.deepcopy(pruned())
    net.second = nn.Conv2d(4, 9, 3)
    with pytest.raises(RecipeError, match=r"'second\.weight' should have shape"):
        ifso.save(net, tmp_path / "run")
