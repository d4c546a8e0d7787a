"""The work of a run against the public functions: scores as of ifso.score, steps as written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import ALL, CASES, Case, run, tensors
from torch import Tensor, nn

import ifso
from ifso.criteria.ifso import Ifso
from ifso.criteria.registry import create, find, names
from ifso.errors import ScoreError
from ifso.graph.layouts import surviving
from ifso.pruning.moves import Moves
from ifso.pruning.scoring_loop import MakeOptimizer, ScoringLoop
from ifso.pruning.settings import sgd
from ifso.pruning.shrinking_network import ShrinkingNetwork

CRITERIA = tuple(names())
BATCH_BY_BATCH = tuple(name for name in CRITERIA if not find(name).prepares)
"""Those whose score of several batches is the mean of what they say of each alone."""


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return sum(
        (out.sin() * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)).mean()
        for out in tensors(run(model, batch))
    )


class Sigmoids(nn.Sequential):
    """act(0) = 0.5: a removed unit still says something to the weights that read it."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 6, 3), nn.Sigmoid(), nn.Conv2d(6, 5, 3), nn.Softplus(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(5, 4),
        )  # fmt: skip


SIGMOIDS = Case("sigmoids", Sigmoids, CASES["plain"].make_inputs)


def plain_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return sgd(parameters, learning_rate=0.05)


def worker_on(
    case: Case, criterion: Any = "magnitude", make: MakeOptimizer = plain_sgd, train: bool = True
) -> ScoringLoop:
    criterion = create(criterion) if isinstance(criterion, str) else criterion
    return ScoringLoop(ShrinkingNetwork(case.model().train(train), case.graph()), criterion, loss_fn, make)


def some_units(case: Case, seed: int = 1, share: float = 0.3) -> list[int]:
    """Units that may go, at random."""
    graph, random = case.graph(), torch.Generator().manual_seed(seed)
    queue = Moves(graph).ordered(torch.rand(graph.num_units, generator=random, dtype=torch.float64))
    units: list[int] = []
    while (move := queue.next()) is not None and (not units or len(units) + len(move.units) <= share * graph.num_units):
        queue.take(move)
        units += move.units
    return units


def flat(case: Case, scores: dict[str, Tensor]) -> Tensor:
    return torch.cat([scores[group.name] for group in case.graph().groups])


def close(wanted: Tensor, found: Tensor, tolerance: float = 1e-9) -> bool:
    return float((wanted - found).abs().max()) <= tolerance * float(wanted.abs().max())


def removed_slices(worker: ScoringLoop) -> dict[str, Tensor]:
    """The numbers of every parameter that belong to removed units."""
    network, found = worker.network, {}
    for name, parameter in network.model.named_parameters():
        layout = network.graph.masking(name)
        if layout is not None:
            gone = ~surviving(layout, network.kept_here).expand(parameter.shape)
            if bool(gone.any()):
                found[name] = parameter.detach().cpu()[gone]
    return found


def moved_inputs(case: Case, seed: int) -> Any:
    """Other inputs of the same kind."""
    random = torch.Generator().manual_seed(seed)
    return case.inputs() + 0.3 * torch.randn(case.inputs().shape, generator=random, dtype=torch.float64)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_scores_of_every_network_as_ifso_score(criterion):
    """With some units gone; on every network that the criterion can score at all."""
    compared = 0
    for case in (*ALL, SIGMOIDS):
        if not case.prunable:
            continue
        worker = worker_on(case, criterion, train=False)
        worker.remove_(some_units(case))
        try:
            wanted = ifso.score(
                case.model(), case.graph(), loss_fn, [case.inputs()], criterion, keep=worker.network.keep
            )
        except ScoreError:
            continue
        worker.round([case.inputs()], train=False)
        found, _ = worker.collect()
        assert close(flat(case, wanted), found), case.name
        compared += 1
    assert compared >= (30 if criterion == "bn-scale" else 60)


@pytest.mark.parametrize("criterion", BATCH_BY_BATCH)
@pytest.mark.parametrize("name", ["residual", "depthwise", "squeeze-excite", "vit", "sigmoids"])
def test_mean_over_batches_and_rounds_in_train_mode(criterion, name):
    if criterion == "bn-scale" and name not in ("residual", "depthwise"):
        pytest.skip("units that pass through no norm have no scale")
    case = SIGMOIDS if name == "sigmoids" else CASES[name]
    batches = [moved_inputs(case, seed) for seed in range(4)]
    worker = worker_on(case, criterion)
    worker.remove_(some_units(case))
    for pair in (batches[:2], batches[2:]):
        worker.round(pair, train=False)
    found, loss = worker.collect()
    model = case.model().train()
    wanted = ifso.score(model, case.graph(), loss_fn, batches, criterion, keep=worker.network.keep)
    assert close(flat(case, wanted), found)
    with ifso.masked(model, case.graph(), worker.network.keep):
        losses = [float(loss_fn(model, batch).detach()) for batch in (batches[0], batches[2])]
    assert loss == pytest.approx(sum(losses) / 2, rel=1e-12)
    assert not worker.collect()[0].any(), "what was collected is gone"


@pytest.mark.parametrize("options", [
    {"inverse": "neumann"}, {"inverse": "sherman-morrison"}, {"inverse": "cg", "curvature": "gauss-newton"},
    {"inverse": "kfac"}, {"coupled": "layers"}, {"weights": "all"},
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::ifso.curvature.solvers.SolverWarning")
@pytest.mark.parametrize("name", ["residual", "sigmoids"])
def test_options_of_ifso_with_removed_units(options, name):
    case = SIGMOIDS if name == "sigmoids" else CASES[name]
    worker = worker_on(case, Ifso(**options), train=False)
    worker.remove_(some_units(case))
    worker.round([case.inputs()], train=False)
    found, _ = worker.collect()
    wanted = ifso.score(case.model(), case.graph(), loss_fn, [case.inputs()], Ifso(**options), keep=worker.network.keep)
    assert close(flat(case, wanted), found, 1e-6)


@pytest.mark.parametrize("criterion", BATCH_BY_BATCH)
def test_removal_by_removal(criterion):
    """Units go in three portions, with steps between: always the score of the weights as they are now."""
    case = CASES["residual"]
    worker, units = worker_on(case, criterion), some_units(case, share=0.4)
    for first in range(0, len(units), 4):
        worker.remove_(units[first : first + 4])
        worker.round([case.inputs()], train=True)
        worker.collect()
        twin = case.model().train()
        twin.load_state_dict(worker.network.model.state_dict())
        if worker.criterion.masks_itself:
            give_back_(twin, worker)
        wanted = ifso.score(twin, case.graph(), loss_fn, [case.inputs()], criterion, keep=worker.network.keep)
        worker.round([case.inputs()], train=False)
        assert close(flat(case, wanted), worker.collect()[0], 1e-6)


@torch.no_grad()
def give_back_(twin: nn.Module, worker: ScoringLoop) -> None:
    """Weights of removed units as they were when they went, which the worker keeps for such a criterion."""
    for number, parameter in enumerate(twin.parameters()):
        parameter += worker.tensors()[f"ghost.{number}"]


def test_ghosts_are_the_weights_that_went():
    case = CASES["residual"]
    worker, units = worker_on(case, "authors"), some_units(case)
    before = {name: parameter.detach().clone() for name, parameter in worker.network.model.named_parameters()}
    worker.remove_(units)
    give_back_(worker.network.model, worker)
    for name, parameter in worker.network.model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_the_authors_score_leaves_modes_alone():
    worker = worker_on(CASES["residual"], "authors", train=False)
    worker.round([CASES["residual"].inputs()], train=False)
    assert not any(module.training for module in worker.network.model.modules())


def test_a_step_is_the_step_of_sgd():
    """v ← 0.9 v + (g + 1e-4 w), w ← w − 0.05 v, on the first batch of each round; batch norm in train mode."""
    case = CASES["residual"]
    worker, units = worker_on(case), some_units(case)
    worker.remove_(units)
    rounds = [[moved_inputs(case, 2 * n), moved_inputs(case, 2 * n + 1)] for n in range(3)]
    model, momenta, losses = case.model().train(), {}, []
    with ifso.masked(model, case.graph(), worker.network.keep):
        for batches in rounds:
            loss = loss_fn(model, batches[0])
            losses.append(float(loss.detach()))
            gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            with torch.no_grad():
                for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
                    momenta[name] = 0.9 * momenta.get(name, 0) + gradient + 1e-4 * parameter
                    parameter -= 0.05 * momenta[name]
            worker.round(batches, train=True)
        for name, tensor in model.state_dict().items():
            found = worker.network.model.state_dict()[name]
            gone = name in case.graph().layouts and "running" in name
            alive = surviving(case.graph().layouts[name], worker.network.kept).expand(tensor.shape) if gone else ...
            assert torch.allclose(found[alive], tensor[alive], rtol=1e-12, atol=1e-14), name
    assert worker.collect()[1] == pytest.approx(sum(losses) / 3, rel=1e-12)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_removed_stays_zero(optimizer):
    """On every network, momentum in hand when units go; it is the same step as within ifso.masked."""
    for case in (*ALL, SIGMOIDS):
        if not case.prunable or (optimizer not in ("sgd", "adam") and case.name not in ("residual", "vit", "sigmoids")):
            continue
        worker = worker_on(case, make=OPTIMIZERS[optimizer])
        worker.round([case.inputs()], train=True)
        worker.remove_(some_units(case))
        before = [parameter.detach().clone() for parameter in worker.network.model.parameters()]
        for _ in range(3):
            worker.round([case.inputs()], train=True)
        gone = removed_slices(worker)
        assert gone, case.name
        assert all(bool((numbers == 0).all()) for numbers in gone.values()), case.name
        after = [parameter.detach() for parameter in worker.network.model.parameters()]
        assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True)), case.name


def test_scores_alone_change_nothing():
    """A round without a step leaves weights, running statistics and modes as they are."""
    case = CASES["residual"]
    for criterion in CRITERIA:
        worker = worker_on(case, criterion)
        worker.remove_(some_units(case))
        before = {name: tensor.clone() for name, tensor in worker.network.model.state_dict().items()}
        worker.round([case.inputs()], train=False)
        for name, tensor in worker.network.model.state_dict().items():
            assert torch.equal(tensor, before[name]), (criterion, name)
        assert worker.network.model.training


class Short:
    """A loss that fails for want of memory on more than ``most`` samples."""

    def __init__(self, most: int) -> None:
        self.most, self.sizes = most, []

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        if len(batch) > self.most:
            raise torch.OutOfMemoryError("too much")
        self.sizes.append(len(batch))
        return model(batch).square().mean()


@pytest.mark.parametrize("criterion", ["ifso", "hrank", "magnitude"])
def test_micro_batches_give_the_same(criterion):
    """In eval mode a mean over samples does not depend on how they are cut: scores, loss and step are the same."""
    case, said = CASES["residual"], []
    batch = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    workers = []
    for short in (Short(1000), Short(2)):
        network = ShrinkingNetwork(case.model().eval(), case.graph())
        worker = ScoringLoop(network, create(criterion), short, plain_sgd)
        worker.tell = said.append
        worker.remove_(some_units(case))
        for _ in range(2):
            worker.round([batch, batch.flip(3)], train=True)
        workers.append((worker, *worker.collect(), short))
    (one, scores, loss, _), (other, cut_scores, cut_loss, short) = workers
    assert close(scores, cut_scores)
    assert cut_loss == pytest.approx(loss, rel=1e-12)
    for name, tensor in one.network.model.state_dict().items():
        assert torch.allclose(tensor, other.network.model.state_dict()[name], rtol=1e-10, atol=1e-13), name
    assert [line for line in said if "micro-batches of 3" in line or "micro-batches of 2" in line] == said
    assert len(said) == 2
    assert max(short.sizes) == 2


def test_scores_that_go_another_way_are_told_once():
    """A loss that forward mode cannot differentiate, beside one that says the same."""
    case, said = CASES["plain"], []
    worker, plain = worker_on(case, "ifso"), worker_on(case, "ifso")
    worker.tell = said.append
    worker.loss_fn._loss_fn = lambda model, batch: torch.cdist(model(batch), torch.zeros(1, 5).double()).mean()
    plain.loss_fn._loss_fn = lambda model, batch: model(batch).square().sum(1).sqrt().mean()
    for one in (worker, plain):
        one.round([case.inputs()], train=False)
        one.round([case.inputs()], train=False)
    assert close(plain.collect()[0], worker.collect()[0], 1e-6)
    assert [line for line in said if "_cdist_forward" in line] == said
    assert len(said) == 1


def test_a_single_sample_that_does_not_fit_is_an_error():
    worker = worker_on(CASES["residual"], "ifso")
    worker.loss_fn._loss_fn = Short(0)
    with pytest.raises((ScoreError, torch.OutOfMemoryError), match=r"memory|too much"):
        worker.round([torch.randn(4, 3, 8, 8, dtype=torch.float64)], train=True)


def test_batches_that_are_not_finite_are_counted():
    case = CASES["residual"]
    worker, spoilt = worker_on(case), case.inputs()
    spoilt[0, 0, 0, 0] = float("nan")
    worker.round([case.inputs(), spoilt], train=False)
    assert worker.spoilt == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("name", ["residual", "depthwise", "sigmoids"])
def test_captured_rounds_are_the_same_as_others(criterion, name):
    """Rounds as a CUDA graph against one operation after another: scores, losses, weights, removals between them."""
    if criterion == "bn-scale" and name == "sigmoids":
        pytest.skip("units that pass through no norm have no scale")
    case = SIGMOIDS if name == "sigmoids" else CASES[name]
    batches = [moved_inputs(case, seed).cuda() for seed in range(4)]
    workers = []
    for captured in (True, False):
        network = ShrinkingNetwork(case.model().cuda().train(), case.graph())
        worker = ScoringLoop(network, create(criterion), on_gpu, plain_sgd)
        worker._capture &= captured
        found = []
        for first in range(0, 8, 2):
            worker.prepare(batches)
            for n in range(4):
                worker.round([batches[n], batches[(n + 1) % 4]], train=True)
            found.append(worker.collect())
            worker.remove_(some_units(case, share=0.4)[first : first + 2])
        workers.append((worker, found))
    (one, found), (other, wanted) = workers
    assert (criterion not in ("ifso", "taylor", "group-fisher")) or one._captured
    assert not other._captured
    for (scores, loss), (right, right_loss) in zip(found, wanted, strict=True):
        assert close(right, scores, 1e-7)
        assert loss == pytest.approx(right_loss, rel=1e-8)
    for name_, tensor in one.network.model.state_dict().items():
        assert torch.allclose(tensor, other.network.model.state_dict()[name_], rtol=1e-7, atol=1e-9), name_
    assert all(bool((numbers == 0).all()) for numbers in removed_slices(one).values())


def on_gpu(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize(("name", "times"), [("magnitude-average", 1), ("random", 1), ("taylor", 3)])
def test_a_criterion_that_needs_no_batches_is_asked_once_a_round(
    name: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, criterion, asked = CASES["plain"], create(name), []
    units = type(criterion).units
    monkeypatch.setattr(type(criterion), "units", lambda *given: asked.append(1) or units(*given))
    worker = worker_on(case, criterion)
    batches = [case.make_inputs()] * 3
    worker.round(batches, train=False)
    assert len(asked) == times
    found, _ = worker.collect()
    assert close(worker.network.in_original(worker._score(batches[0])), found)
