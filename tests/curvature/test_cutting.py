"""Passes of which parts are replayed against plain ones: detectors, other batches, changed weights, and refusals.

Without a GPU, what is recorded is a list of operations on tensors that stay where they are, as in a CUDA graph.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from reference.cuda_graphs import taped
from small_detectors import SIDE, boxes, fcos, retina
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.ssd import SSD

import ifso
from ifso.common.cuda_graphs import Recorded
from ifso.common.torch_state import full_float32
from ifso.criteria.base import Task
from ifso.criteria.ifso import Ifso
from ifso.curvature.primal_cache import PrimalCache
from ifso.curvature.products import Products
from ifso.curvature.submodule_capture import MOST_SHAPES, CapturedSubmodules, capture_submodules
from ifso.pruning.scoring_loop import ScoringLoop
from ifso.pruning.shrinking_network import ShrinkingNetwork
from ifso.tasks.detection import detection_loss

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
EXACT = 1e-10
BOTH = {"backbone", "head"}


class InPlace(nn.Module):
    """A backbone of two levels that writes into its own activations, with no end to a level but such a write."""

    out_channels = (6, 8)

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.BatchNorm2d(8), nn.ReLU(True), nn.Conv2d(8, 6, 3, 2, 1))
        self.coarse = nn.Sequential(nn.Conv2d(6, 8, 3, 2, 1), nn.SiLU(True), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(True))

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        fine = torch.relu_(self.fine(x))
        return OrderedDict([("0", fine), ("1", self.coarse(fine))])


def ssd() -> SSD:
    return SSD(InPlace(), DefaultBoxGenerator([[2], [2]]), (SIDE, SIDE), 4)


def batches(number: int, size: int = 2, device: str = "cpu", dtype: torch.dtype = torch.float64) -> list[Any]:
    """Batches of images with other boxes, of another number each."""
    samples = boxes(train=number * size, test=1).train
    images = [pixels.to(device, dtype) / 255 for pixels in samples.pixels]
    targets = [
        {key: value.to(device) for key, value in samples.target(place).items()} for place in range(number * size)
    ]
    for target in targets:
        target["boxes"] = target["boxes"].to(dtype)
    return [(images[at : at + size], targets[at : at + size]) for at in range(0, number * size, size)]


def traced(model: nn.Module, device: str = "cpu") -> Any:
    dtype = next(model.parameters()).dtype
    return ifso.trace(model.to(device).eval(), ([torch.rand(3, SIDE, SIDE, dtype=dtype, device=device)],))


def pair(model: nn.Module, graph: Any, record: Any = taped, **options: Any) -> tuple[Products, Products]:
    """Plain products, and those with a cut."""
    loss = options.pop("loss", detection_loss)
    plain, cut = (Products(model, graph, loss, **options) for _ in range(2))
    plain.captured = None
    if record is not None:
        cut.captured = capture_submodules(model, graph, set(cut._tensors), record)
    assert isinstance(cut.captured, CapturedSubmodules)
    return plain, cut


def all_products(products: Products, batch: Any, shared: bool = True) -> list[Tensor]:
    primal = PrimalCache() if shared else None
    v = products.mixed(batch, primal)
    return [v, products.sensitivity(batch, v, primal), products.hessian(batch, v)]


def assert_equal(plain: Products, cut: Products, batch: Any, tolerance: float = EXACT, **options: Any) -> None:
    for wanted, found in zip(all_products(plain, batch, **options), all_products(cut, batch, **options), strict=True):
        assert float(wanted.norm()) > 0
        assert float((found - wanted).norm() / wanted.norm()) <= tolerance


def step(model: nn.Module) -> None:
    """Other weights in the same place."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.mul_(1 + 0.01 * (number % 5))


@pytest.mark.parametrize(
    ("make", "mode"),
    [
        (retina, "train"),
        (retina, "eval"),
        pytest.param(fcos, "train", marks=pytest.mark.slow),
        (ssd, "train"),
        (ssd, "eval"),
    ],
)
def test_replayed_parts_equal_plain_ones(make: Callable[[], nn.Module], mode: str) -> None:
    model = make().double()
    graph = traced(model)
    model.train(mode == "train")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    plain, cut = pair(model, graph)
    recorded = []
    for number, batch in enumerate(batches(3)):
        assert_equal(plain, cut, batch)
        assert cut.captured.replayed == (BOTH if number else set())
        recorded.append(len(cut.captured._calls))
        step(model)
    assert recorded == [0, 6, 6]
    assert not cut.captured.refused
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("options", [{"weights": "all"}, {"fused": False}])
def test_every_manner_of_a_pass(options: dict[str, Any]) -> None:
    model = retina().double()
    plain, cut = pair(model.train(), traced(model), **options)
    model.train()
    for batch in batches(2):
        assert_equal(plain, cut, batch)
    assert cut.captured.replayed == BOTH


def test_half_precision() -> None:
    def halved(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return detection_loss(model, batch)

    model = retina()
    plain, cut = pair(model, traced(model), loss=halved)
    for batch in batches(3, dtype=torch.float32):
        assert_equal(plain, cut, batch, 1e-6)
        step(model)
    assert cut.captured.replayed == BOTH


def test_passes_that_share_nothing() -> None:
    model = retina().double()
    plain, cut = pair(model, traced(model))
    for batch in batches(3):
        assert_equal(plain, cut, batch, shared=False)
        step(model)
    assert cut.captured.replayed == BOTH


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_scores_of_units(micro_batch: int | None) -> None:
    model = retina().double()
    graph = traced(model)
    criterion = Ifso(micro_batch=micro_batch)
    tasks = [Task(model, graph, detection_loss, graph.kept(None)) for _ in range(2)]
    products = criterion.products(tasks[1])
    products.captured = capture_submodules(model, graph, set(products._tensors), taped)
    for batch in batches(3):
        wanted, found = (criterion.units(task, batch) for task in tasks)
        assert float((found - wanted).norm() / wanted.norm()) <= EXACT
    assert products.captured.replayed == BOTH


def test_weights_elsewhere_in_memory_are_recorded_anew() -> None:
    model = retina().double()
    plain, cut = pair(model, traced(model))
    one, two, three, four = batches(4)
    for batch in (one, two):
        assert_equal(plain, cut, batch)
    convolution = model.head.classification_head.cls_logits
    convolution.weight.data = 2 * convolution.weight.data
    assert_equal(plain, cut, three)
    assert "backbone" in cut.captured.replayed
    assert "head" not in cut.captured.replayed
    assert_equal(plain, cut, four)
    assert cut.captured.replayed == BOTH


def test_passes_over_two_batches_in_turn_do_not_mix() -> None:
    model = retina().double()
    plain, cut = pair(model, traced(model))
    one, two, three, four = batches(4)
    for batch in (one, two):
        assert_equal(plain, cut, batch)
    found = []
    for products in (plain, cut):
        primals = PrimalCache(), PrimalCache()
        v = products.mixed(three, primals[0])
        products.mixed(four, primals[1])
        found.append(products.sensitivity(three, v, primals[0]))
    assert float((found[1] - found[0]).norm() / found[0].norm()) <= EXACT


class Siamese(nn.Module):
    """One backbone, called twice in a pass; a loss that looks at values."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for sizes in pairwise((3, 4, 4, 5, 5, 2)) for layer in (nn.Conv2d(*sizes, 3), nn.Tanh())]
        self.body = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(x) * self.body(x.flip(0) + 1)
        return found[found > found.detach().median()]


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch.clone()).square().mean()


def images(seed: int, side: int = 12) -> Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def products_of(model: nn.Module) -> tuple[Products, Products]:
    graph = ifso.trace(model, images(0))
    assert graph.on_real_tensors
    return pair(model, graph, loss=squares)


def test_a_part_that_is_called_twice() -> None:
    model = Siamese().double()
    plain, cut = products_of(model)
    for seed in range(3):
        assert_equal(plain, cut, images(seed))
    assert cut.captured.replayed == {"body"}
    assert len(cut.captured._calls) == 6


def test_a_pass_that_follows_adds_nothing_to_what_it_reads() -> None:
    """Behind a frozen layer a mask has a gradient in the second pass alone."""
    model = Siamese().double()
    model.body[0].requires_grad_(False)
    plain, cut = products_of(model)
    for seed in range(3):
        assert_equal(plain, cut, images(seed))
    leaders = [piece for (_, kind, *_), piece in cut.captured._calls.items() if kind == "mixed"]
    missing = [[call.back is None for call in piece.cache.calls] for piece in leaders]
    assert missing == 2 * [[True, True, False, False, False]]


class Sometimes(nn.Module):
    """Looks at one of two outputs only for bright images, and writes into the other."""

    def __init__(self) -> None:
        super().__init__()
        self.part = _Two()

    def forward(self, x: Tensor) -> Tensor:
        always, sometimes = self.part(x)
        always.mul_(2)
        return always + sometimes.square() if bool(x.mean() > 0) else always


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh())
        self.ends = nn.ModuleList([nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1)])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        stem = self.stem(x)
        return tuple(end(stem) for end in self.ends)


def test_an_output_that_is_not_always_used() -> None:
    model = Sometimes().double()
    plain, cut = products_of(model)
    for seed, shift in enumerate((1, 1, -1, 1)):
        assert_equal(plain, cut, images(seed) + shift)
    assert cut.captured.replayed == {"part"}


def test_few_shapes_are_recorded() -> None:
    model = Siamese().double()
    plain, cut = products_of(model)
    for side in range(11, 12 + MOST_SHAPES):
        for seed in range(2):
            assert_equal(plain, cut, images(seed, side))
        assert bool(cut.captured.replayed) == (side < 11 + MOST_SHAPES)
    assert "shapes" in cut.captured.refused["body"]
    assert_equal(plain, cut, images(2, 11))
    assert cut.captured.replayed == {"body"}


class Around(Siamese):
    """Another module around the body."""

    def __init__(self, around: nn.Module) -> None:
        super().__init__()
        around.inner = self.body
        self.body = around


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.drop(x))


class Elsewhere(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), torch.empty(3, device="meta")


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mul_(0.5))


class Boxed:
    """Something that is no tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Gives(nn.Module):
    def forward(self, x: Tensor) -> Boxed:
        return Boxed(self.inner(x))


class Unpacked(Around):
    """Takes what is in the box."""

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(x).x * self.body(x.flip(0) + 1).x
        return found[found > found.detach().median()]


class First(Around):
    """Takes the first of two."""

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(x)[0] * self.body(x.flip(0) + 1)[0]
        return found[found > found.detach().median()]


class Hooked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize(
    ("make", "reason", "left"),
    [
        (lambda: Around(Drops()), "Drops draws random numbers", {"body.inner"}),
        (lambda: First(Elsewhere()), "a tensor on another device", {"body.inner"}),
        (lambda: Around(Writes()), "Writes writes into its input", {"body.inner"}),
        (lambda: Unpacked(Gives()), "Gives takes or gives a Boxed", {"body.inner"}),
        (lambda: Around(Hooked()), "a hook on a Conv2d", set()),
    ],
)
def test_what_cannot_be_replayed_runs_plainly_and_says_why(
    make: Callable[[], nn.Module], reason: str, left: set[str]
) -> None:
    model = make().double().train()
    if "Conv2d" in reason:
        model.body.inner[0].register_forward_hook(lambda *_: None)
    plain, cut = products_of(model)
    model.train()
    for seed in range(3):
        assert_equal(plain, cut, images(seed))
        torch.manual_seed(seed)
    assert reason in cut.captured.refused["body"]
    assert cut.captured.replayed == left


class Waits(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * float(x.abs().max()))


def test_what_waits_for_values_gives_way_to_its_children() -> None:
    model = Around(Waits()).double()
    plain, cut = products_of(model)
    for seed in range(4):
        assert_equal(plain, cut, images(seed))
    assert "not permitted" in cut.captured.refused["body"]
    assert cut.captured.replayed == {"body.inner"}


def test_too_little_memory_to_record() -> None:
    model = Siamese().double()
    plain, cut = products_of(model)

    def record(*_: Any) -> Recorded:
        raise torch.OutOfMemoryError("CUDA out of memory")

    cut.captured._record = record
    for seed in range(3):
        assert_equal(plain, cut, images(seed))
    assert "memory" in cut.captured.refused["body"]
    assert not cut.captured.free()


@pytest.mark.parametrize("course", ["mixed", "sensitivity"])
def test_what_is_recorded_is_let_go_where_memory_runs_out(course: str) -> None:
    model = Siamese().double()
    plain, cut = products_of(model)
    for seed in range(2):
        assert_equal(plain, cut, images(seed))
    calls: list[int] = []

    def tight(model: nn.Module, batch: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == (1 if course == "mixed" else 2):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return squares(model, batch)

    cut.loss_fn = tight
    assert_equal(plain, cut, images(2))
    assert len(calls) == 4
    assert not cut.captured.replayed
    assert not cut.captured._calls
    calls.clear()
    with pytest.raises(torch.OutOfMemoryError):
        cut.mixed(images(3)) if course == "mixed" else all_products(cut, images(3))


def test_nothing_is_cut_without_need() -> None:
    model = retina().double()
    graph = traced(model)
    assert Products(model, graph, detection_loss).captured is None
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    where = "cuda" if torch.cuda.is_available() else "cpu"
    graph = ifso.trace(plain.to(where), torch.zeros(1, 3, 8, 8, device=where))
    assert Products(plain, graph, squares).captured is None


@gpu
@pytest.mark.parametrize("make", [retina, fcos, ssd])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_captured_parts_on_a_gpu_equal_plain_ones(make: Callable[[], nn.Module], mode: str) -> None:
    model = make().double().cuda()
    graph = traced(model, "cuda")
    model.train(mode == "train")
    plain, cut = pair(model, graph, None)
    for batch in batches(4, device="cuda"):
        assert_equal(plain, cut, batch, 1e-9)
        step(model)
    assert not cut.captured.refused
    assert cut.captured.replayed == BOTH


@gpu
@pytest.mark.parametrize("make", [retina, fcos, ssd])
def test_captured_parts_on_a_gpu_with_its_own_kernels(make: Callable[[], nn.Module]) -> None:
    """Float32 in channels-last order, as detectors are scored: batch norm by Triton, layers of both passes joined."""
    model = make().cuda().to(memory_format=torch.channels_last)
    graph = traced(model, "cuda")
    plain, cut = pair(model.train(), graph, None)
    for batch in batches(4, device="cuda", dtype=torch.float32):
        with full_float32():
            assert_equal(plain, cut, batch, 2e-3)
    assert not cut.captured.refused
    assert cut.captured.replayed == BOTH


@gpu
def test_a_frozen_layer_on_a_gpu() -> None:
    model = Siamese().double().cuda()
    model.body[0].requires_grad_(False)
    plain, cut = pair(model, ifso.trace(model, images(0).cuda()), None, loss=squares)
    for seed in range(4):
        assert_equal(plain, cut, images(seed).cuda(), 1e-9)
    assert cut.captured.replayed == {"body"}


@gpu
def test_a_part_on_a_gpu_that_waits_for_it_gives_way_to_its_children() -> None:
    model = Around(Waits()).double().cuda()
    plain, cut = pair(model, ifso.trace(model, images(0).cuda()), None, loss=squares)
    for seed in range(5):
        assert_equal(plain, cut, images(seed).cuda(), 1e-9)
    assert set(cut.captured.refused) == {"body"}
    assert cut.captured.replayed == {"body.inner"}


@gpu
def test_a_run_with_captured_parts_on_a_gpu_equals_a_plain_one() -> None:
    """Scores, steps and removals of a detector."""
    model = retina().double().cuda()
    graph = traced(model, "cuda")
    model.train()
    found: list[list[Tensor]] = []
    for cut in (False, True):
        network = ShrinkingNetwork(copy.deepcopy(model), graph)
        worker = ScoringLoop(network, Ifso(), detection_loss, lambda ps: torch.optim.SGD(ps, lr=0.001, momentum=0.9))
        products = worker.criterion.products(worker._scorer.task)
        assert isinstance(products.captured, CapturedSubmodules)
        if not cut:
            products.captured = None
        said: list[str] = []
        worker.tell = said.append
        scores = []
        for number, batch in enumerate(batches(6, device="cuda")):
            worker.round([batch], train=True)
            if number % 2:
                scores.append(worker.collect()[0])
                worker.remove_([int(scores[-1].masked_fill(scores[-1] == 0, torch.inf).argmin())])
        assert not said
        assert (products.captured.replayed if cut else products.captured) == (BOTH if cut else None)
        found.append(scores)
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm() / one.norm()) < 1e-6
