"""What ``ifso finetune`` and ``ifso train`` are asked alike: how a network is trained, on what, and where."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.eval_options import positive, real, share
from ifso.cli.prune_settings import refuse_others, stored_options

if TYPE_CHECKING:
    from ifso.cli.distributed import Place
    from ifso.data import Data
    from ifso.training.settings import TrainSettings

FIELDS = (
    "epochs", "batch", "lr", "schedule", "milestones", "factor", "warm_up", "momentum", "nesterov", "weight_decay",
    "decay_all", "label_smoothing", "ema", "clip", "accumulate", "distill", "temperature", "precision", "channels_last",
    "compile", "seed", "warm_up_steps", "cutmix",
)  # fmt: skip
"""Those of ``TrainSettings``, which takes torch to ask for."""

TEACHER = ("teacher", "teacher_weights")
OPTIONS = (*FIELDS, "recipe", "model", "weights", "data", "validation", "evaluate_every", "device", *TEACHER)
"""Those that a training is resumed with."""

RECIPE, BOXES = "paper", "detection"
"""Recipes where none is asked for: of classifiers, and of detectors on ``coco:`` data."""


RECIPES = (
    "paper; ours: one cycle, and a teacher; quick: shorter; brief: 30 epochs, no teacher; "
    "patient: longer, on mixed images; scratch: from random weights; "
    f"detection: the paper's for RetinaNet ({RECIPE}; {BOXES} on coco:)"
)


def add_recipe(group: Any) -> None:
    """Recipe and settings that change it. None has a default here: what is not given is left to the recipe."""
    group.add_argument("--recipe", metavar="NAME", help=RECIPES)
    group.add_argument("--epochs", type=int, metavar="N", help="rounds over the training set (200)")
    group.add_argument("--batch", type=int, metavar="N", help="images in a batch, of all ranks together (128)")
    group.add_argument("--lr", type=real, metavar="RATE", help="highest learning rate (0.1)")
    group.add_argument("--schedule", metavar="NAME", help="step, cosine, one-cycle or constant")
    group.add_argument("--milestones", nargs="+", type=real, metavar="SHARE", help="of the run, for step (0.6 0.8)")
    group.add_argument("--factor", type=real, metavar="X", help="by which step multiplies the rate there (0.1)")
    group.add_argument("--warm-up", type=real, metavar="EPOCHS", help="in which the rate rises at first (0)")
    group.add_argument("--warm-up-steps", type=int, metavar="N", help="the same in steps (0; 500 in detection)")
    group.add_argument("--momentum", type=real, metavar="X", help="of SGD (0.9)")
    _add_switch(group, "--nesterov", "Nesterov's momentum")
    group.add_argument("--weight-decay", type=real, metavar="X", help="1e-4; 2e-4 in ours, 5e-4 in quick")
    _add_switch(group, "--decay-norms", "weight decay for norms and biases, too", dest="decay_all")
    group.add_argument("--label-smoothing", type=real, metavar="SHARE", help="of every label, for all classes (0)")
    group.add_argument("--cutmix", type=real, metavar="SHARE", help="of images into which a piece of another goes (0)")
    group.add_argument("--ema", type=real, metavar="DECAY", help="moving average of the weights, such as 0.999 (none)")
    group.add_argument("--clip", type=real, metavar="NORM", help="largest norm of the gradient (none)")
    group.add_argument("--accumulate", type=int, metavar="N", help="micro-batches that make a batch (1)")


def add_data(group: Any) -> None:
    """Downloading and what is set apart."""
    group.add_argument("--download", action="store_true", help="fetch CIFAR into the folder of --data if need be")
    group.add_argument(
        "--validation", type=share, metavar="SHARE",
        help="of the training set, or number of images, set apart and evaluated on in place of the test set (0)",
    )  # fmt: skip


def add_running(group: Any) -> None:
    """Device, precision, and how to go on."""
    group.add_argument("--device", metavar="NAME", help="cpu or cuda (cpu)")
    group.add_argument(
        "--precision", metavar="NAME", help="float32, tf32, bf16 or fp16 (float32; bf16 and channels-last on cuda)"
    )
    _add_switch(group, "--channels-last", "channels-last memory layout")
    _add_switch(group, "--compile", "torch.compile the network")
    group.add_argument("--evaluate-every", type=positive, metavar="N", help="epochs between two evaluations (1)")
    group.add_argument("--resume", action="store_true", help="go on after an interruption; needs no other options")
    group.add_argument("--json", action="store_true", help="print one JSON document")


def _add_switch(group: Any, option: str, help_: str, dest: str | None = None) -> None:
    named = {} if dest is None else {"dest": dest}
    group.add_argument(option, action=argparse.BooleanOptionalAction, help=help_, **named)


def gather(
    args: argparse.Namespace, folder: Path, defaults: Mapping[str, Any], command: str, *others: Path
) -> dict[str, Any]:
    """The options of a training in ``folder`` as JSON values: given ones, stored ones if resumed, and defaults.

    On a GPU the defaults are bf16 and channels-last; they are stored, so that a training can go on elsewhere.
    ``others`` are further folders that are opened with it.
    """
    named = {name: getattr(args, name, None) for name in OPTIONS}
    given = json.loads(json.dumps({name: value for name, value in named.items() if value is not None}))
    stored = stored_options(folder, OPTIONS, command) if args.resume else {}
    if stored:
        refuse_others(given, stored, folder, *others)
    options = {**defaults, **stored, **given}
    options.setdefault("device", "cpu")
    if not args.resume and options["device"].partition(":")[0] == "cuda":
        options = {"precision": "bf16", "channels_last": True, **options}
    return options


def settings_of(options: Mapping[str, Any]) -> TrainSettings:
    """The recipe with the settings that were given."""
    from ifso.errors import TrainingError
    from ifso.training.settings import recipe_of

    if options.get("epochs") == 0:
        raise TrainingError("--epochs 0 trains nothing; give 1 or more")
    changes = {name: options[name] for name in FIELDS if name in options}
    return recipe_of(options.get("recipe") or default_recipe(options.get("data")), **changes)


def default_recipe(data: str | None) -> str:
    """The recipe for data of that name, where none is asked for.

    >>> default_recipe("coco:cells"), default_recipe("digits")
    ('detection', 'paper')
    """
    return BOXES if is_boxes(data) else RECIPE


def is_boxes(data: str | None) -> bool:
    """Is DATA a name of images with boxes?"""
    return data is not None and data.startswith("coco:")


def opening(options: Mapping[str, Any], settings: TrainSettings, place: Place, *, download: bool) -> dict[str, Any]:
    """What data is opened with."""
    return {
        "device": place.device,
        "seed": settings.seed,
        "validation": options.get("validation", 0),
        "rank": place.rank,
        "ranks": place.ranks,
        "download": download,
    }


def tell_notes(data: Data, say: Callable[[str], None]) -> None:
    """What data says of itself: boxes that were left out, a file that stands in for another."""
    for note in getattr(data, "notes", ()):
        say(note)


def one_of(options: Sequence[Mapping[str, Any]], name: str, default: str) -> str:
    """The value that all trainings side by side have of an option."""
    from ifso.errors import IfsoError

    found = sorted({str(each.get(name, default)) for each in options})
    if len(found) > 1:
        raise IfsoError(f"trainings with --{name} {' and '.join(found)} cannot go on side by side; resume them apart")
    return found[0] if found else default
