"""``ifso bench score``: the score beside what else could be computed, as multiples of one gradient, in one run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ifso.bench.correlation import spearman
from ifso.common.devices import let_go_of
from ifso.common.text import describe_error
from ifso.common.timing import WARM_UP, Ready, machine, make_ready, middle, peak_bytes
from ifso.common.torch_state import full_float32, undisturbed
from ifso.costs.cost import count
from ifso.criteria.base import Criterion, Task
from ifso.criteria.ifso import Ifso
from ifso.criteria.registry import create
from ifso.curvature.weight_space import readers, weight_space
from ifso.data import open_data
from ifso.data.cifar import cifar_part, read_npz
from ifso.data.compatibility import classes_of
from ifso.errors import IfsoError
from ifso.graph.channel_graph import ChannelGraph
from ifso.graph.tracing import trace
from ifso.models import create_model, default_inputs
from ifso.models.detectors import is_detector
from ifso.tasks.classification import cross_entropy
from ifso.tasks.detection import detection_loss
from ifso.training.profiling import in_memory_format

PRECISIONS = ("float32", "tf32", "bf16")
METHODS = {
    "gradient": "forward and backward of all parameters",
    "training step": "a gradient and a step of SGD with momentum",
    "ifso": "S, exact",
    "ifso, all in TF32": "S, the network itself rounded to TF32 as well",
    "ifso, full primal": "S, the network itself in full float32",
    "authors": "S by finite differences, as in the authors' program",
    "double backward": "S by PyTorch's backward of the backward pass",
    "group-fisher": "squared mask gradients per sample",
    "taylor": "mask gradient, first order",
}
CAREFUL = {"ifso, all in TF32": False, "ifso, full primal": True}
"""An option of the criterion ``ifso``, in TF32 only."""


@dataclass(frozen=True)
class ScoreSetup:
    """What is measured: a MODEL, the size of its batch and images, where and in which precision and layout.

    ``weights`` is a file with trained weights and ``images`` an .npz of CIFAR images; both are random otherwise.
    ``size`` is of squares, or (height, width). A detector sees images with :data:`BOXES` random boxes each. With
    ``data``, DATA of the command line, the batch is its first one for training, and the loss is its own.
    """

    model: str
    batch: int = 128
    device: str = "cpu"
    precision: str = "float32"
    channels_last: bool = False
    size: int | tuple[int, int] | None = None
    weights: str | None = None
    images: str | None = None
    eval_mode: bool = False
    data: str | None = None


BOXES = 8
PHOTOGRAPH = (480, 640)
"""Height and width of a detector's images if nothing is said."""

SCORES = ("ifso", "authors")
"""Methods that approximate the exact score, so that it can be said how well: names begin with one of these."""

RANK_MACS = 2e10
"""Ranks are compared on as many samples of the batch as have so many MACs: in float64 they are slow."""


class ScoreBench:
    """A model in train mode with one batch of random images."""

    def __init__(self, setup: ScoreSetup) -> None:
        self.setup, self.device = setup, torch.device(setup.device)
        self.model = create_model(setup.model, weights=setup.weights).eval()
        layout = torch.channels_last if setup.channels_last else torch.contiguous_format
        self.model = self.model.to(self.device).to(memory_format=layout)
        self.detects = is_detector(self.model) and not hasattr(self.model, "roi_heads")  # which draw regions at random
        self.data = None if setup.data is None else open_data(setup.data, device=self.device)
        self.batch: Any
        example: Any
        if self.data is not None:
            given = next(iter(self.data.train_batches(setup.batch))), self.data.example_inputs()
            self.batch, example = in_memory_format(given, channels_last=setup.channels_last)
        elif self.detects:
            self.batch = self._random_boxes()
            example = (self.batch[0][:1],)
        else:
            images, labels = self._random_batch() if setup.images is None else _cifar_batch(setup.images, setup.batch)
            images = images.to(self.device).contiguous(memory_format=layout)
            self.batch, example = (images, labels.to(self.device)), images[:1]
        self.graph: ChannelGraph = trace(self.model, example)
        self.model.train(not setup.eval_mode)
        self._space = weight_space(self.model, self.graph)
        self._readers = [one for one in readers(self.graph, self.device) if one.parameter in self._space.tensors]

    def _random_batch(self) -> tuple[Tensor, Tensor]:
        example = default_inputs(self.setup.model, self.model)
        if not isinstance(example, Tensor):
            raise IfsoError(
                f"bench score measures image classifiers and one-stage detectors; {self.setup.model} is neither"
            )
        shape = list(example.shape[1:])
        if self.setup.size is not None:
            shape[1:] = _sides(self.setup.size)
        images = torch.randn(self.setup.batch, *shape)
        classes = self.model(images[:1].to(self.device)).shape[1]
        return images, torch.randint(0, classes, (self.setup.batch,))

    def _random_boxes(self) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Images of one size, each with boxes of a tenth to a half of its sides."""
        if self.setup.images is not None:
            raise IfsoError(f"--images are for classifiers; {self.setup.model} is a detector, leave them out")
        height, width = _sides(self.setup.size or PHOTOGRAPH)
        random, classes = torch.Generator().manual_seed(0), classes_of(self.model) or 2
        images, targets = [], []
        for _ in range(self.setup.batch):
            images.append(torch.rand(3, height, width, generator=random).to(self.device))
            middles, sides = torch.rand(BOXES, 2, generator=random), torch.rand(BOXES, 2, generator=random)
            sides = 0.1 + 0.4 * sides
            corners = torch.cat([middles - sides / 2, middles + sides / 2], 1).clamp(0, 1)
            boxes = corners * torch.tensor([width, height, width, height])
            labels = torch.randint(1, classes, (BOXES,), generator=random)
            targets.append({"boxes": boxes.to(self.device), "labels": labels.to(self.device)})
        return images, targets

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross entropy, or the losses of a detector or of DATA, the model under autocast if it is to run in bf16."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.setup.precision == "bf16"):
            if self.data is not None:
                return self.data.loss_fn(model, batch)
            if self.detects:
                return detection_loss(model, batch)
            logits = model(batch[0])
        return F.cross_entropy(logits.float(), batch[1])

    def methods(self) -> dict[str, Callable[[], Any]]:
        """What is compared, by name."""
        others: dict[str, Callable[[], Any]] = {
            "gradient": lambda: torch.autograd.grad(self.loss(self.model, self.batch), self._learning()),
            "training step": self._training_step,
            "double backward": self._double_backward,
        }
        names = [name for name in METHODS if name not in CAREFUL or self.setup.precision == "tf32"]
        return {name: others.get(name) or self._scores(name) for name in names}

    @property
    def rank_samples(self) -> int:
        """How many samples of the batch ranks are compared on; none with a loss that may take many minutes."""
        if self.detects or self.data is not None:
            return 0
        each = count(self.graph, self.graph.kept(None)).macs
        return min(self.setup.batch, max(2, int(RANK_MACS / each)))

    def fidelity(self, scores: Mapping[str, _Scores]) -> dict[str, float | None]:
        """Spearman's correlation of scores with the exact ones in float64, on the same samples.

        Those of the authors' program are compared with exact ones that treat coupled layers as it does.
        """
        images, labels = (part[: self.rank_samples] for part in self.batch)
        model = copy.deepcopy(self.model).double()
        task = Task(model, self.graph, cross_entropy, self.graph.kept(None))
        signed = Ifso().signed(task, (images.double(), labels))
        exact = {False: signed.sum(0).abs().tolist(), True: signed.abs().sum(0).tolist()}
        found = {name: replace(score, batch=(images, labels))() for name, score in scores.items()}
        return {name: spearman(values.tolist(), exact[name == "authors"]) for name, values in found.items()}

    def _learning(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _training_step(self) -> None:
        """A first step, which makes its momentum; of length zero, so that the network stays as it is."""
        weights = self._learning()
        optimizer = torch.optim.SGD(weights, lr=0.0, momentum=0.9)
        self.loss(self.model, self.batch).backward()
        optimizer.step()
        for weight in weights:
            weight.grad = None

    def _scores(self, name: str) -> _Scores:
        criterion = create(name.partition(",")[0], **({"careful": CAREFUL[name]} if name in CAREFUL else {}))
        return _Scores(criterion, Task(self.model, self.graph, self.loss, self.graph.kept(None)), self.batch)

    def _double_backward(self) -> list[Tensor]:
        """v and S as one would first write them: masks on the weights, gradients of gradients."""
        masks = [torch.ones(self.graph.num_units + 1, device=self.device, requires_grad=True) for _ in self._readers]
        scaled = dict(self._space.tensors)
        for reader, mask in zip(self._readers, masks, strict=True):
            tensor = scaled[reader.parameter]
            scaled[reader.parameter] = tensor * reader.spread(mask, tensor.shape)
        with undisturbed(self.model):
            loss = self.loss(_Substituted(self.model, scaled), self.batch)
        weights = list(self._space.tensors.values())
        grads = torch.autograd.grad(loss, weights + masks, create_graph=True)
        to_weights, to_masks = grads[: len(weights)], grads[len(weights) :]
        v = torch.autograd.grad(torch.stack([part.sum() for part in to_masks]).sum(), weights, retain_graph=True)
        inner = torch.stack([(u * g).sum() for u, g in zip(v, to_weights, strict=True)]).sum()
        return list(torch.autograd.grad(inner, masks))


@dataclass(frozen=True)
class _Scores:
    """The scores of one batch."""

    criterion: Criterion
    task: Task
    batch: Any

    def __call__(self) -> Tensor:
        return self.criterion.units(self.task, self.batch)

    @property
    def replayed(self) -> bool:
        """Whether the last call replayed parts of the network."""
        parts = self.criterion.replayed_parts(self.task)
        return parts is not None and bool(parts.replayed)


def _cifar_batch(path: str, count: int) -> tuple[Tensor, Tensor]:
    """The first training images of an .npz (x_train, y_train), normalised as in the authors' program."""
    images, labels = read_npz(Path(path), ("x_train", "y_train"))
    if len(images) < count:
        raise IfsoError(f"--images {path} holds {len(images)} images; {count} are needed")
    part = cifar_part("cifar10", images[:count], labels[:count], Path(path), "train")
    return part.normalized(part.pixels), part.labels


class _Substituted(nn.Module):
    """The model with other tensors for some parameters."""

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.train(model.training)
        self._call = lambda *inputs: functional_call(model, tensors, inputs)

    def forward(self, *inputs: Any) -> Any:
        """Logits, or the losses of a detector."""
        return self._call(*inputs)


def _sides(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _warm(function: Callable[[], Any], device: torch.device) -> Ready:
    """A function that cannot be captured as a whole: matching boxes to anchors waits for the GPU.

    It counts as captured if it replays the network before that.
    """
    for _ in range(WARM_UP if device.type == "cuda" else 1):
        function()
    return Ready(function, function, device, captured=isinstance(function, _Scores) and function.replayed)


@dataclass
class _Trials:
    """The methods of a workbench one after another; one that fails leaves its reason, and the others go on."""

    bench: ScoreBench
    say: Callable[[str], None]
    ready: dict[str, Ready] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    scores: dict[str, _Scores] = field(default_factory=dict)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """A method that fails within leaves its reason in its row; without a gradient there is nothing to compare."""
        try:
            yield
        except Exception as error:
            if name == "gradient":
                raise
            let_go_of(error)
            self.ready.pop(name, None)
            self.scores.pop(name, None)
            self.rows[name] = {"error": str(error) if isinstance(error, IfsoError) else describe_error(error)}
            self.say(f"{self.bench.setup.model}: {name} failed: {self.rows[name]['error']}")

    def take(self, name: str, function: Callable[[], Any]) -> None:
        """Run a method, see how much memory it takes, and make it ready to be timed."""
        self.say(f"{self.bench.setup.model}: {name}")
        device = self.bench.device
        with self.attempt(name):
            function()
            self.rows[name] = {"peak_bytes": peak_bytes(function, device)}
            self.ready[name] = _warm(function, device) if self.bench.detects else make_ready(function, device)
            if isinstance(function, _Scores):
                self.rows[name]["note"] = function.criterion.note(function.task)
                if name.startswith(SCORES):
                    self.scores[name] = function

    def time(self, repeats: int) -> dict[str, list[float]]:
        """Seconds in rounds of all that are ready."""
        found: dict[str, list[float]] = {name: [] for name in self.ready}
        for _ in range(repeats):
            for name, ready in list(self.ready.items()):
                with self.attempt(name):
                    found[name].append(ready.seconds())
        return {name: found[name] for name in self.ready}

    def ranks(self) -> dict[str, float | None]:
        """How well scores agree with exact ones; nothing, with a word about it, if these cannot be computed."""
        samples = self.bench.rank_samples
        if not samples:
            return {}
        self.say(f"{self.bench.setup.model}: {samples} samples in float64, for the ranks")
        try:
            return self.bench.fidelity(self.scores)
        except Exception as error:
            let_go_of(error)
            self.say(f"{self.bench.setup.model}: no ranks: {describe_error(error)}")
            return {}


def measure(
    setup: ScoreSetup,
    repeats: int,
    say: Callable[[str], None],
    methods: Sequence[str] | None = None,
    *,
    ranks: bool = True,
) -> dict[str, Any]:
    """Seconds and peak memory of the methods (of all, if None), and as multiples of the gradient's.

    A method that fails has its ``error`` in the place of numbers. ``ranks=False`` leaves float64 out.
    """
    _check(setup, methods)
    cudnn = torch.backends.cudnn
    before, cudnn.benchmark = cudnn.benchmark, True
    with full_float32(setup.precision != "tf32"), ExitStack() as stack:
        stack.callback(setattr, cudnn, "benchmark", before)
        bench = ScoreBench(setup)
        trials = _Trials(bench, say)
        for name, function in bench.methods().items():
            if methods is None or name in {"gradient", *methods}:
                trials.take(name, function)
        say(f"{setup.model}: {repeats} rounds of all")
        seconds = trials.time(repeats)
        fidelity = trials.ranks() if ranks else {}
    rows = trials.rows
    step = rows.get("training step", {}).get("peak_bytes")
    for name, row in rows.items():
        if "error" in row:
            continue
        row["seconds"], row["spread"] = middle(seconds[name])
        row["times"], _ = middle([own / one for own, one in zip(seconds[name], seconds["gradient"], strict=True)])
        row["memory"] = row["peak_bytes"] / rows["gradient"]["peak_bytes"]
        if step:
            row["memory_in_steps"] = row["peak_bytes"] / step
        row["captured"], row["fidelity"] = trials.ready[name].captured, fidelity.get(name)
    about = machine(bench.device)
    files = ("weights", setup.weights), ("images", setup.images), ("data", setup.data)
    names = {key: value and Path(value).name for key, value in files}
    compared = bench.rank_samples if fidelity else 0
    return {
        **asdict(setup), **names, **about, "units": bench.graph.num_units, "rank_samples": compared, "methods": rows,
    }  # fmt: skip


def _check(setup: ScoreSetup, methods: Sequence[str] | None) -> None:
    """Refuse what cannot be measured."""
    unknown = set(methods or ()) - set(METHODS)
    if unknown:
        raise IfsoError(f"no method {min(unknown)!r}; choose among {', '.join(METHODS)}")
    if setup.data is not None and (setup.images is not None or setup.size is not None):
        raise IfsoError("--data says what is in a batch; leave --images and --size out")
    if setup.precision not in PRECISIONS:
        raise IfsoError(f"precision {setup.precision!r} is unknown; choose one of {', '.join(PRECISIONS)}")
    if setup.device.partition(":")[0] not in ("cpu", "cuda"):
        raise IfsoError(f"--device {setup.device!r} is unknown; give cpu or cuda")
    if setup.device.startswith("cuda") and not torch.cuda.is_available():
        raise IfsoError("no CUDA device was found; use --device cpu")
