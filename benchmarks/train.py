"""``python -m benchmarks train``: a step of training of a pruned network in several shapes, alone and side by side."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import ifso
from ifso.cli.bench import add_machine, set_threads
from ifso.cli.console import chatter_to_stderr, console, print_json, say, table, write_json
from ifso.common.devices import usable_device
from ifso.common.timing import in_turns, machine, make_ready, middle
from ifso.data import open_data
from ifso.data.base import ImageData
from ifso.data.generated import generated_images
from ifso.errors import BudgetError, DataError, IfsoError
from ifso.models.registry import network_for
from ifso.surgery.recipe import recipe_of
from ifso.tasks.classification import cross_entropy
from ifso.training.padded_finetune import Padding
from ifso.training.precision import autocast, tensor_cores
from ifso.training.settings import TrainSettings
from ifso.training.steps import PlainSteps, Steps
from ifso.training.trainer import Trainer, fit_side_by_side, seeded_rng
from ifso.training.triton_layers import available, triton_layers

if TYPE_CHECKING:
    from rich.table import Table

GENERATED = "generated"

SHAPES = ("compact", "rounded", "padded")

EIGHTS = 8

EPOCHS, STEPS_OF_AN_EPOCH = 200, 390
"""Of the paper's fine-tuning on CIFAR in batches of 128: what the time of a step is multiplied with."""

FLOOR_ROUNDS = 20


@dataclass(frozen=True)
class Setup:
    """What is trained, where and how. ``kept`` is the share of MACs that a random choice of units leaves.

    ``shapes`` are those of the pruned network; without pruning (``kept=1``) there is the whole one alone.
    An epoch has ``steps`` steps and is timed ``repeats`` times after one that is not.
    """

    model: str = "ifso:resnet32"
    kept: float = 0.5
    shapes: tuple[str, ...] = SHAPES
    device: str = "cpu"
    precision: str = "float32"
    channels_last: bool = False
    compile: bool = False
    batch: int = 128
    lanes: tuple[int, ...] = (1, 8)
    steps: int = 100
    repeats: int = 5
    data: str = GENERATED
    seed: int = 0

    def settings(self) -> TrainSettings:
        """Of every training here."""
        return TrainSettings(
            epochs=self.repeats + 1, batch=self.batch, lr=0.01, nesterov=True, precision=self.precision,
            channels_last=self.channels_last, compile=self.compile, seed=self.seed,
        )  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How steps are made: as CUDA graphs or as they come, with the kernels for narrow layers or the library's."""

    name: str
    captured: bool
    narrow: bool


@dataclass(frozen=True)
class Shape:
    """A network in the shape it is trained in, and the share of the whole network's MACs that this computes."""

    name: str
    model: nn.Module
    macs: float


class _Trainer(Trainer):
    """A lane that goes one way, whether or not there is a quicker one."""

    def __init__(self, model: nn.Module, batches: Any, settings: TrainSettings, way: Way) -> None:
        super().__init__(model, batches, settings, loss_fn=cross_entropy)
        self._train_step.narrow, self._captured = way.narrow, way.captured

    def _steps(self) -> Steps:
        return super()._steps() if self._captured else PlainSteps(self._train_step, self._batches)


def ways(device: torch.device, precision: str) -> list[Way]:
    """The ways there are; the first one is the reference.

    >>> [way.name for way in ways(torch.device("cpu"), "bf16")]
    ['plain']
    """
    plain = Way("plain", captured=False, narrow=False)
    if device.type != "cuda":
        return [plain]
    graphs = [Way("CUDA graph", captured=True, narrow=False)]
    if precision == "bf16" and available():
        graphs.append(Way("CUDA graph, narrow kernels", captured=True, narrow=True))
    return [plain, *graphs]


class Workbench:
    """The data, and the network in all its shapes; ``notes`` says which one there is not."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.device = setup, usable_device(setup.device)
        self.data = _images(setup, self.device)
        self.notes: list[str] = []

    def shapes(self) -> Iterator[Shape]:
        """The whole network if all of it is kept; else pruned as it comes, rounded, and in its former shape."""
        whole, wanted = self._network(), self.setup.shapes
        if self.setup.kept == 1.0:
            yield Shape("whole", whole, 1.0)
            return
        compact, macs = self._pruned(None)
        if "compact" in wanted:
            yield Shape("compact", compact, macs)
        if "rounded" in wanted:
            yield from self._rounded()
        if "padded" in wanted:
            recipe = recipe_of(compact)
            assert recipe is not None
            yield Shape("padded", Padding(whole, recipe, self.data.example_inputs()).pad_(whole, compact), 1.0)

    def _rounded(self) -> Iterator[Shape]:
        try:
            rounded, share = self._pruned(EIGHTS)
        except BudgetError as error:
            self.notes.append(f"not rounded to {EIGHTS}: {error}")
        else:
            yield Shape(f"rounded to {EIGHTS}", rounded, share)

    def _network(self) -> nn.Module:
        setup = self.setup
        torch.manual_seed(setup.seed)
        return network_for(
            setup.model, self.data.num_classes, device=setup.device, channels_last=setup.channels_last
        ).train()

    def _pruned(self, round_to: int | None) -> tuple[nn.Module, float]:
        """A network without some units, chosen at random, and the share of its MACs that is left."""
        model = self._network()
        result = ifso.prune(
            model, self.data.train_batches(self.setup.batch), self.data.loss_fn,
            budget=ifso.Budget(macs=self.setup.kept), example_inputs=self.data.example_inputs(), criterion="random",
            schedule="one-shot", normalize="none", round_to=round_to, recalibrate=0, seed=self.setup.seed,
        )  # fmt: skip
        return model, result.after.macs / result.before.macs

    def side_by_side(self, shape: Shape, way: Way, count: int) -> tuple[list[float], list[str]]:
        """Seconds of a step in every epoch of every one of ``count`` networks, and what the lanes noted."""
        batches = [self.data.train_batches(self.setup.batch) for _ in range(count)]
        lanes = [_Trainer(copy.deepcopy(shape.model), each, self.setup.settings(), way) for each in batches]
        for failure in fit_side_by_side(lanes):
            if failure is not None:
                raise failure
        seconds = [epoch.seconds / self.setup.steps for lane in lanes for epoch in lane.done[1:]]
        return seconds, sorted({note for lane in lanes for note in lane.notes})

    def floor(self, shape: Shape, way: Way) -> float:
        """Seconds of loss and gradient alone on a batch that stays the same; on a GPU as a CUDA graph."""
        setup, batch = self.setup, next(iter(self.data.train_batches(self.setup.batch)))
        model = copy.deepcopy(shape.model)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        called = torch.compile(model) if setup.compile else model

        def gradient() -> None:
            narrow = triton_layers(setup.precision, self.device) if way.narrow else nullcontext()
            with tensor_cores(setup.precision), autocast(setup.precision, self.device), narrow:
                loss = cross_entropy(called, batch)  # type: ignore[arg-type]
            torch.autograd.grad(loss, parameters)

        rounds = FLOOR_ROUNDS if self.device.type == "cuda" else setup.repeats
        return middle(in_turns({"gradient": make_ready(gradient, self.device)}, rounds)["gradient"])[0]

    def row(self, shape: Shape, way: Way) -> dict[str, Any]:
        """All measurements of one shape trained one way; a way without graphs is measured alone only."""
        seconds, notes = self.side_by_side(shape, way, 1)
        alone, spread = middle(seconds)
        several = {}
        for count in self.setup.lanes if way.captured or self.device.type != "cuda" else ():
            if count > 1:
                step = middle(self.side_by_side(shape, way, count)[0])[0]
                several[str(count)] = {"step_seconds": step, "throughput": count * alone / step}
        return {
            "shape": shape.name,
            "way": way.name,
            "macs": shape.macs,
            "step_seconds": alone,
            "spread": spread,
            "floor_seconds": self.floor(shape, way),
            "projected_seconds": EPOCHS * STEPS_OF_AN_EPOCH * alone,
            "side_by_side": several,
            "notes": notes,
        }


def _images(setup: Setup, device: torch.device) -> ImageData:
    """As many images, some of them several times, as an epoch of ``steps`` steps takes."""
    if setup.data == GENERATED:
        data: Any = generated_images("cifar10", device=device, seed=setup.seed)
    else:
        data = open_data(setup.data, device=device, seed=setup.seed)
    if not isinstance(data, ImageData):
        raise DataError(
            f"bench train takes images held in memory, which {setup.data} are not; "
            f"give digits, cifar10:PATH, cifar100:PATH or {GENERATED}"
        )
    random = torch.Generator().manual_seed(setup.seed)
    places = torch.randint(len(data.train), (setup.steps * setup.batch,), generator=random)
    return replace(data, train=data.train.part(places))


def measure(
    setup: Setup, say: Callable[[str], None], keep: Callable[[dict[str, Any]], object] = lambda _: None
) -> dict[str, Any]:
    """Every shape trained every way, one after the other. ``keep`` is given all that is there after each of them."""
    _refuse(setup)
    found: dict[str, Any] = {}
    with tensor_cores(setup.precision), seeded_rng([], setup.seed):
        bench, rows = Workbench(setup), []
        for shape in bench.shapes():
            for way in ways(bench.device, setup.precision):
                say(f"{setup.model}: {shape.name}, {way.name}")
                rows.append(_with_memory(bench, shape, way))
                found = _document(bench, rows)
                keep(found)
    return {**found, "complete": True}


def _document(bench: Workbench, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    setup = bench.setup
    about = {**machine(bench.device), "complete": False}
    projected = {"epochs": EPOCHS, "steps": STEPS_OF_AN_EPOCH}
    kind = setup.data.partition(":")[0]
    return {**asdict(setup), "data": kind, **about, "projected": projected, "rows": [*rows], "notes": bench.notes}


def _with_memory(bench: Workbench, shape: Shape, way: Way) -> dict[str, Any]:
    try:
        return bench.row(shape, way)
    except torch.OutOfMemoryError as error:
        raise IfsoError(
            f"there is too little memory for {max(bench.setup.lanes)} networks; give fewer --lanes or a smaller --batch"
        ) from error


def _refuse(setup: Setup) -> None:
    if not 0 < setup.kept <= 1:
        raise BudgetError(f"kept={setup.kept} is not a share; give more than 0, and 1 for the whole network")
    numbers: Sequence[int] = (setup.batch, setup.steps, setup.repeats, *setup.lanes)
    if min(numbers) < 1:
        raise IfsoError("batch, steps, repeats and lanes are numbers from 1 up")
    if not setup.shapes or not {*setup.shapes} <= {*SHAPES}:
        raise IfsoError(f"shapes {', '.join(setup.shapes) or 'none'} will not do; give some of {', '.join(SHAPES)}")


DEFAULTS = {"cpu": {"lanes": (1, 2), "steps": 4}, "cuda": {"lanes": (1, 8), "steps": 390}}

CAPTION = (
    "ms: a step of one network alone, from fetching its batch to SGD; median over epochs, the first one not counted. "
    "Floor: loss and gradient alone on one batch, on a GPU as a CUDA graph. MACs: what is computed, of the whole "
    "network. × N: throughput of N networks side by side over that of one after another. Projected: not run, but "
    "{epochs} epochs of {steps} steps at this rate, without evaluation. Compact: as pruned; padded: the same network "
    "in its former shape, with zeros."
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("train", help="seconds of a training step, alone and side by side")
    parser.add_argument("--model", default="ifso:resnet32", metavar="MODEL", help="default: %(default)s")
    parser.add_argument(
        "--kept",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="of the MACs, chosen at random; 1 for all (%(default)s)",
    )
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help="some of compact, rounded and padded (all of them)")
    parser.add_argument(
        "--data", default="generated", metavar="DATA", help="digits, cifar10:PATH, cifar100:PATH or %(default)s"
    )
    parser.add_argument("--batch", type=int, default=128, metavar="N", help="images in a batch (%(default)s)")
    parser.add_argument("--lanes", nargs="+", type=int, metavar="N", help="networks side by side (1 8; cpu: 1 2)")
    parser.add_argument("--steps", type=int, metavar="N", help="that are timed together (390; cpu: 4)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="how often (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the network")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON document there as it grows")
    add_machine(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print the table."""
    if args.threads is not None and args.threads < 1:
        raise IfsoError(f"--threads {args.threads}: give 1 or more")
    set_threads(args)
    usual = DEFAULTS["cuda" if args.device.startswith("cuda") else "cpu"]
    lists = {name: tuple(getattr(args, name)) for name in ("lanes", "shapes") if getattr(args, name) is not None}
    given = lists if args.steps is None else {**lists, "steps": args.steps}
    names = ("model", "kept", "device", "precision", "channels_last", "compile", "batch", "repeats", "data", "seed")
    options: dict[str, Any] = {**usual, **given, **{name: getattr(args, name) for name in names}}

    def keep(result: dict[str, Any]) -> dict[str, Any]:
        document = {"bench": "train", "result": result}
        if args.out is not None:
            write_json(args.out, document)
        return document

    with chatter_to_stderr():
        result = measure(Setup(**options), say, keep)
    document = keep(result)
    if args.json:
        print_json(document)
    else:
        console().print(_table(result), *result["notes"], *_notes(result["rows"]), sep="\n")
    return 0


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    return [f"* {row['shape']}, {row['way']}: {note}" for row in rows for note in row["notes"]]


def _table(result: dict[str, Any]) -> Table:
    layout = "channels last" if result["channels_last"] else "channels first"
    compiled = ", compiled" if result["compile"] else ""
    title = (
        f"Training: {result['model']} with {result['kept']:.0%} of its MACs; batch {result['batch']}, "
        f"{result['data']} images; {result['device_name']}, {result['precision']}, {layout}{compiled}, "
        f"torch {result['torch']}"
    )
    counts = list(dict.fromkeys(count for row in result["rows"] for count in row["side_by_side"]))
    headings = ("shape", "steps", "MACs", "ms", "± ms", "floor ms", *(f"× {count}" for count in counts), "projected s")
    rows = []
    for row in result["rows"]:
        times = [f"{1000 * row[name]:.2f}" for name in ("step_seconds", "spread", "floor_seconds")]
        found = row["side_by_side"]
        ratios = [f"{found[count]['throughput']:.2f}" if count in found else "–" for count in counts]
        way, projected = row["way"] + (" *" if row["notes"] else ""), f"{row['projected_seconds']:.0f}"
        rows.append((row["shape"], way, f"{row['macs']:.1%}", *times, *ratios, projected))
    return table(headings, rows, title=title, caption=CAPTION.format(**result["projected"]), left=2)
