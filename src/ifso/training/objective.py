"""What a network learns from: batches, with or without what a teacher says, and the loss that goes with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ifso.common.distributed import several
from ifso.common.loss_fn import LossFn
from ifso.data.base import Data, detects
from ifso.data.batches import TrainBatches
from ifso.errors import TrainingError
from ifso.tasks.classification import cross_entropy
from ifso.tasks.detection import detection_loss, detection_losses
from ifso.training.cutmix import MixedBatches
from ifso.training.detector_distillation import detector_distillation
from ifso.training.losses import NamedLosses, classification, distillation, distillation_from_logits
from ifso.training.settings import TrainSettings
from ifso.training.teacher_cache import Answers, TaughtBatches, pays

Tables = dict[nn.Module, Answers]
"""Answers that were asked for already, by the teacher."""

NO_TEACHER = "distillation needs a teacher, the network before pruning; give one, or distill=0"


def lessons(
    data: Data,
    settings: TrainSettings,
    teacher: nn.Module | None = None,
    *,
    ranks: int = 1,
    tables: Tables | None = None,
    networks: int = 1,
    say: Callable[[str], None] | None = None,
) -> tuple[Any, LossFn]:
    """Training batches of ``data`` and the loss, as the settings want them.

    A teacher on data held in memory is asked about every variant of every image beforehand, where that is less work;
    ``tables`` keeps its answers for other networks with the same teacher, ``networks`` of them in all. Mixed images
    (``cutmix``) have too many variants for that: the teacher is asked in every step.
    """
    if settings.batch % ranks:
        raise TrainingError(f"a batch of {settings.batch} cannot be shared by {ranks} processes; give a multiple")
    batches = data.train_batches(settings.batch // ranks)
    if settings.cutmix:
        batches = _mixed(data, batches, settings.cutmix)
    if detects(data):
        return batches, _detection_loss(data, settings, teacher)
    if data.loss_fn is not cross_entropy:
        return batches, _own_loss(data, settings)
    if not settings.distill:
        return batches, classification(settings.label_smoothing, mixed=settings.cutmix > 0)
    if teacher is None:
        raise TrainingError(NO_TEACHER)
    options: dict[str, Any] = {
        "temperature": settings.temperature,
        "weight": settings.distill,
        "label_smoothing": settings.label_smoothing,
    }
    table = not several() and pays(batches, networks * settings.epochs, data.num_classes or 1000)
    if not table or not isinstance(batches, TrainBatches):
        return batches, distillation(teacher, **options, mixed=settings.cutmix > 0)
    tables = {} if tables is None else tables
    if teacher not in tables:
        if say is not None:
            say("asking the teacher about every variant of every image")
        tables[teacher] = Answers.of(teacher, batches, settings.precision)
    return TaughtBatches(batches, tables[teacher]), distillation_from_logits(_third, **options)


def _mixed(data: Data, batches: Any, share: float) -> MixedBatches:
    """The batches with mixed images; one clear line where they cannot be mixed."""
    if detects(data):
        raise TrainingError(f"{data.name} has boxes; cutmix is for classifiers only, give 0")
    if data.loss_fn is not cross_entropy:
        raise TrainingError(f"{data.name} has a loss of its own; cutmix is for classifiers only, give 0")
    if not isinstance(batches, TrainBatches):
        raise TrainingError(f"{data.name} is not held in memory, which cutmix needs; give 0")
    return MixedBatches(batches, share)


def _third(batch: Any) -> Any:
    return batch[2]


def _detection_loss(data: Data, settings: TrainSettings, teacher: nn.Module | None) -> LossFn:
    """The losses of a detector by name, and how far it is from its teacher; one that the data brings is taken as is."""
    if settings.label_smoothing:
        raise TrainingError(f"{data.name} has boxes; label smoothing is for classifiers only")
    if settings.compile:
        raise TrainingError(f"{data.name} has boxes; detectors cannot be compiled, train without --compile")
    if data.loss_fn is not detection_loss:
        return _own_loss(data, settings)
    if not settings.distill:
        return NamedLosses(detection_losses)
    if teacher is None:
        raise TrainingError(NO_TEACHER)
    return NamedLosses(detector_distillation(teacher, weight=settings.distill, temperature=settings.temperature))


def _own_loss(data: Data, settings: TrainSettings) -> LossFn:
    if settings.distill or settings.label_smoothing:
        raise TrainingError(
            f"{data.name} has a loss of its own; distillation and label smoothing are for classifiers only"
        )
    return data.loss_fn
