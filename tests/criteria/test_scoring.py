"""``ifso.score``: means over batches, bounded memory, and one clear line for every bad input."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import CASES
from torch import nn

import ifso
from ifso.criteria.base import Criterion
from ifso.criteria.gradients import Taylor
from ifso.criteria.scorer import score
from ifso.criteria.weights import Magnitude
from ifso.errors import KeepError, ScoreError, StaleGraphError, TraceError


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def batches(number, size=4):
    random = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, 3, 8, 8, generator=random).double(), torch.randint(5, (size,), generator=random))
        for _ in range(number)
    ]


@pytest.fixture
def model():
    return CASES["plain"].model()


@pytest.fixture
def graph():
    return CASES["plain"].graph()


@dataclass(frozen=True)
class Mine(Criterion):
    """Somebody's own: says what it is told to."""

    name = "mine"
    needs = "gradients"

    says: object = None

    def units(self, task, batch):
        return self.says(task, batch)


# ---- over batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", ["taylor", "group-fisher", "hrank"])
def test_the_score_is_the_mean_over_batches(model, graph, criterion):
    three = batches(3)
    parts = [score(model, graph, loss_fn, [batch], criterion) for batch in three]
    found = score(model, graph, loss_fn, iter(three), criterion)
    for name, values in found.items():
        torch.testing.assert_close(values, sum(part[name] for part in parts) / 3)
    assert not torch.equal(found["stem.conv"], parts[0]["stem.conv"])


def test_batches_are_gone_through_once_and_not_kept(model, graph):
    class Holder:
        def __init__(self, pair):
            self.pair = pair

    made, alive = [], []

    def stream():
        for x, y in batches(5):
            alive.append(sum(ref() is not None for ref in made))
            batch = Holder((x, y))
            made.append(weakref.ref(batch))
            yield batch
            del batch

    score(model, graph, lambda model, batch: loss_fn(model, batch.pair), stream(), "taylor")
    assert len(made) == 5
    assert max(alive) <= 1


def test_criteria_that_need_no_data_touch_no_batches(model, graph):
    class Untouchable:
        def __iter__(self):
            raise AssertionError("iterated")

    assert score(model, graph, None, Untouchable(), "magnitude")


def test_an_object_of_ones_own(model, graph):
    found = score(model, graph, loss_fn, batches(2), Mine(lambda task, batch: torch.arange(14.0)))
    assert found["stem.conv"].tolist() == list(range(8))
    assert found["body.conv"].tolist() == list(range(8, 14))


def test_units_that_are_gone_score_nothing(model, graph):
    keep = {"stem.conv": torch.tensor([True] * 6 + [False] * 2)}
    found = score(model, graph, loss_fn, batches(1), Mine(lambda task, batch: torch.ones(14)), keep=keep)
    assert found["stem.conv"].tolist() == [1.0] * 6 + [0.0] * 2
    assert found["body.conv"].tolist() == [1.0] * 6


def test_a_criterion_that_masks_by_itself_gets_the_whole_model(model, graph):
    keep = {"stem.conv": torch.arange(8) < 5}

    @dataclass(frozen=True)
    class Whole(Mine):
        masks_itself = True

    def rows(task, batch):
        found = (task.model.stem.conv.weight.abs().sum((1, 2, 3)) > 0).double()
        return torch.cat([found.sum().expand(8), task.kept[8:-1]])

    assert score(model, graph, None, batches(1), Mine(rows), keep=keep)["stem.conv"].tolist() == [5] * 5 + [0] * 3
    assert score(model, graph, None, batches(1), Whole(rows), keep=keep)["stem.conv"].tolist() == [8] * 5 + [0] * 3
    with pytest.raises(KeepError):
        score(model, graph, None, batches(1), Whole(rows), keep={"stem.conv": torch.zeros(8).bool()})


def test_what_all_batches_share_is_made_once(model, graph):
    made = []

    def counted(task, batch):
        return task.memo("ones", lambda: made.append(1) or torch.ones(14))

    score(model, graph, None, batches(3), Mine(counted))
    assert made == [1]


def test_the_mode_is_put_back_when_the_loss_changes_it(model, graph):
    def evaluating(model, batch):
        model.eval()
        return loss_fn(model, batch)

    model.train()
    model.head.eval()
    score(model, graph, evaluating, batches(1), "taylor")
    assert model.training
    assert model.stem.bn.training
    assert not model.head.training


# ---- bad input ------------------------------------------------------------------------------------------------------


def refusal(model, graph, loss_fn, batches, criterion="taylor", **more):
    with pytest.raises(ScoreError) as caught:
        score(model, graph, loss_fn, batches, criterion, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("empty", [[], (), iter(()), {}.items()], ids=["list", "tuple", "iterator", "view"])
def test_no_batch_at_all(model, graph, empty):
    assert "batches ran out before the first one" in refusal(model, graph, loss_fn, empty)


def test_a_generator_that_is_used_up(model, graph):
    stream = iter(batches(1))
    score(model, graph, loss_fn, stream, "taylor")
    assert "batches ran out" in refusal(model, graph, loss_fn, stream)


ONE = batches(1)[0]


@pytest.mark.parametrize(
    "one",
    [ONE[0], ONE, list(ONE), {"x": ONE[0], "y": ONE[1]}, ONE[0].numpy(), "digits"],
    ids=["tensor", "tuple", "list", "dict", "array", "str"],
)
def test_one_batch_by_mistake(model, graph, one):
    assert "give an iterable of batches, e.g. [batch]" in refusal(model, graph, loss_fn, one)


def test_a_list_of_tensors_is_a_list_of_batches(model, graph):
    inputs = [x for x, _ in batches(2)]
    assert score(model, graph, lambda model, x: model(x).square().mean(), inputs, "taylor")


def test_batches_that_cannot_be_gone_through(model, graph):
    assert "batches is int; give an iterable" in refusal(model, graph, loss_fn, 5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("criterion", ["taylor", "group-fisher", "hrank"])
def test_a_loss_that_is_not_finite_names_the_batch(model, graph, criterion, bad):
    numbers = iter([1.0, 1.0, bad])
    words = refusal(model, graph, lambda model, batch: loss_fn(model, batch) * next(numbers), batches(3), criterion)
    assert words.startswith(f"the loss on batch 3 is not finite ({bad})")


def test_a_loss_that_is_not_finite_is_the_reason_even_if_the_criterion_fails_of_it(model, graph):
    def fail(task, batch):
        task.loss_fn(task.model, batch)
        raise ScoreError("the solver did not converge")

    words = refusal(model, graph, lambda model, batch: loss_fn(model, batch) * torch.nan, batches(1), Mine(fail))
    assert words.startswith("the loss on batch 1 is not finite")


def test_a_score_that_is_not_finite_names_batch_and_group(model, graph):
    values = torch.ones(14)
    values[10] = torch.nan
    words = refusal(model, graph, loss_fn, batches(2), Mine(lambda task, batch: values))
    assert words.startswith("criterion 'mine' on batch 1: the score of group 'body.conv' is not finite")
    found = score(model, graph, None, batches(2), Mine(lambda *_: values), keep={"body.conv": torch.arange(6) != 2})
    assert found["body.conv"].tolist() == [1, 1, 0, 1, 1, 1]


def test_scores_of_the_wrong_shape(model, graph):
    words = refusal(model, graph, loss_fn, batches(1), Mine(lambda task, batch: torch.ones(3)))
    assert words == "criterion 'mine' must give 14 scores, one for each unit, got shape (3,)"


@pytest.mark.parametrize(
    ("bad_loss", "words"),
    [
        (lambda model, batch: 1.0, "loss_fn returned float"),
        (lambda model, batch: model(batch[0]), "loss_fn returned a tensor of shape (4, 5)"),
        (lambda model, batch: loss_fn(model, batch).detach(), "the loss has no gradient"),
        (lambda model, batch: model(batch[0]).argmax(), "loss_fn returned torch.int64"),
    ],
    ids=["number", "not scalar", "detached", "integer"],
)
@pytest.mark.parametrize("criterion", ["taylor", "group-fisher"])
def test_a_loss_that_will_not_do(model, graph, criterion, bad_loss, words):
    assert words in refusal(model, graph, bad_loss, batches(1), criterion)


@pytest.mark.parametrize("criterion", ["taylor", "group-fisher", "hrank"])
def test_integer_images(model, graph, criterion):
    pair = (torch.randint(255, (4, 3, 8, 8), dtype=torch.uint8), torch.zeros(4, dtype=torch.long))
    words = refusal(model, graph, loss_fn, [*batches(1), pair], criterion)
    assert words.startswith("loss_fn failed on batch 2: RuntimeError: ")
    assert ".float()" in words


def test_inputs_of_another_shape(model, graph):
    words = refusal(model, graph, loss_fn, [(torch.randn(4, 7, 8, 8).double(), torch.zeros(4).long())])
    assert words.startswith("loss_fn failed on batch 1: RuntimeError: ")
    assert "give batches of the shape that the model takes" in words


def test_a_norm_of_a_single_value():
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(12, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 5)
    )
    graph = ifso.trace(model.eval(), torch.randn(1, 3, 2, 2))
    words = refusal(model.train(), graph, loss_fn, [(torch.randn(1, 3, 2, 2), torch.zeros(1).long())])
    assert words.startswith("loss_fn failed on batch 1: ValueError: Expected more than 1 value per channel")
    assert words.endswith("give larger batches or images, or keep more units")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes of that size"),
        MemoryError(),
    ],
)
def test_a_lack_of_memory_of_any_kind(model, graph, error):
    def full(*_):
        raise error

    assert refusal(model, graph, full, batches(1), "taylor").endswith("; give smaller batches")


def test_a_loss_with_a_mistake_of_its_own(model, graph):
    message = r"loss_fn failed on batch 1: KeyError: 'label' \(.*test_scoring.py, line \d+\); check that loss_fn"
    with pytest.raises(ScoreError, match=message) as caught:
        score(model, graph, lambda model, batch: {}["label"], batches(1), "taylor")
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_backward_pass_that_fails(model, graph):
    class Stuck(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("no way\nback")

    words = refusal(model, graph, lambda model, batch: Stuck.apply(loss_fn(model, batch)), batches(1))
    assert words == "criterion 'taylor' failed on batch 1: RuntimeError: no way back"


def test_errors_of_the_batches_are_the_callers_own(model, graph):
    def broken():
        yield from batches(1)
        raise FileNotFoundError("image 7")

    with pytest.raises(FileNotFoundError, match="image 7"):
        score(model, graph, loss_fn, broken(), "taylor")


def test_nothing_to_prune():
    case = CASES["recurrent"]
    words = refusal(case.model(), case.graph(), loss_fn, [], "magnitude")
    assert words == "nothing in Recurrent can be pruned, so there is no score; see graph.frozen"


def test_a_graph_of_another_model(graph):
    with pytest.raises(StaleGraphError, match=r"call ifso\.trace again"):
        score(CASES["residual"].model(), graph, loss_fn, batches(1), "taylor")


def test_a_keep_that_will_not_do(model, graph):
    with pytest.raises(KeepError, match="no group named 'stem'"):
        score(model, graph, loss_fn, batches(1), "taylor", keep={"stem": torch.ones(8).bool()})
    with pytest.raises(KeepError):
        score(model, graph, loss_fn, batches(1), "taylor", keep={"stem.conv": torch.zeros(8).bool()})


def test_bad_criteria(model, graph):
    assert "option 'p' beside a criterion object: set it in Magnitude(…)" in refusal(
        model, graph, None, None, Magnitude(), p=2
    )
    assert "criterion must be a Criterion object" in refusal(model, graph, None, None, Taylor)
    assert "no criterion 'tailor'" in refusal(model, graph, None, None, "tailor")
    assert "has no option 'seed'" in refusal(model, graph, None, None, "magnitude", seed=1)


def test_the_model_is_put_back_after_an_error(model, graph):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    refusal(model, graph, lambda model, batch: loss_fn(model.eval(), batch) * torch.nan, batches(1), keep={
        "stem.conv": torch.arange(8) < 5
    })  # fmt: skip
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_numpy_and_plain_python_batches(model, graph):
    """A batch can be anything that the loss takes."""

    def from_numpy(model, batch):
        return loss_fn(model, (torch.from_numpy(batch["x"]), torch.tensor(batch["y"])))

    found = score(model, graph, from_numpy, [{"x": np.ones((2, 3, 8, 8)), "y": [0, 3]}], "taylor")
    assert float(found["stem.conv"].sum()) > 0


def test_a_network_in_which_nothing_reads_a_unit_but_a_module_without_weights():
    """Depthwise layers follow their channels; the mask acts where they are read at last."""
    net = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), nn.Conv2d(4, 2, 1)).double()
    batch = torch.randn(3, 2, 6, 6).double()
    graph = ifso.trace(net, batch)
    found = score(net, graph, lambda model, x: model(x).sin().mean(), [batch], "taylor")
    (values,) = found.values()
    features = net[2](net[1](net[0](batch)))
    mask = torch.ones(4, dtype=torch.float64, requires_grad=True)
    net[3](features * mask[:, None, None]).sin().mean().backward()
    torch.testing.assert_close(values, mask.grad.abs())


# ---- devices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", ["ifso", "taylor", "group-fisher", "true-loss", "hrank"])
def test_a_batch_on_another_device_is_said_in_one_line(model, graph, criterion):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, y = batches(1)[0]
    with pytest.raises(ScoreError, match="the model is on cpu, what it is given on cpu and meta; move one") as caught:
        score(model, graph, loss_fn, [(x.to("meta"), y)], criterion)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_loss_that_moves_its_batch_may_find_it_anywhere(model, graph):
    x, y = batches(1)[0]
    found = score(model, graph, lambda model, batch: loss_fn(model, (x, batch[1])), [(x.to("meta"), y)])
    torch.testing.assert_close(found, score(model, graph, loss_fn, [(x, y)]))


def test_a_model_without_numbers_is_refused(graph):
    with pytest.raises(ScoreError, match="is on the meta device, which holds no numbers"):
        score(CASES["plain"].model().to("meta"), graph, loss_fn, batches(1))


def test_the_other_functions_say_it_too(model, graph):
    x, y = batches(1)[0]
    keep = {group.name: torch.arange(group.size) > 0 for group in graph.groups}
    with pytest.raises(ScoreError, match="what it is given on cpu and meta"):
        ifso.true_loss_change(model, graph, keep, loss_fn, [(x.to("meta"), y)])
    with pytest.raises(TraceError, match="the model is on cpu, what it is given on meta"):
        ifso.trace(model, x.to("meta"))
