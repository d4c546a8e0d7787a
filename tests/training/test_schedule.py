"""Learning rates: written out step by step, and exact where they jump."""

import math

import pytest

from ifso.errors import TrainingError
from ifso.training.optimizers import rate, rates
from ifso.training.settings import TrainSettings


@pytest.mark.parametrize("steps", [1, 3, 98, 352, 391])
def test_the_papers_milestones_are_exactly_epochs_120_and_160(steps):
    found = rates(TrainSettings(), steps)
    assert len(found) == 200 * steps
    assert found[: 120 * steps] == [0.1] * (120 * steps)
    assert found[120 * steps : 160 * steps] == pytest.approx([0.01] * (40 * steps), rel=1e-12)
    assert found[160 * steps :] == pytest.approx([0.001] * (40 * steps), rel=1e-12)


@pytest.mark.parametrize("epochs", range(5, 60, 5))
def test_milestones_at_whole_epochs_are_exact_for_any_length(epochs):
    """Also for shares that rounding has moved, such as 1 − 0.4 or 0.1 · 6."""
    for early in (0.6, 1 - 0.4, 0.1 * 6, 0.7 - 0.1, math.nextafter(0.6, 1), math.nextafter(0.6, 0)):
        found = rates(TrainSettings(epochs=epochs, lr=1, milestones=(early, 0.8)), 7)
        assert [found.index(value) for value in sorted(set(found), reverse=True)] == [
            0,
            7 * epochs * 3 // 5,
            7 * epochs * 4 // 5,
        ]


def test_progress_counted_in_epochs_jumps_at_the_same_step():
    settings = TrainSettings()
    for epoch, part in ((119, 390 / 391), (120, 0.0), (159, 390 / 391), (160, 0.0)):
        step = 391 * epoch + round(391 * part)
        assert rate(settings, (epoch + part) / 200) == rates(settings, 391)[step]


def test_cosine_and_one_cycle_written_out():
    cosine = rates(TrainSettings(epochs=4, lr=0.2, schedule="cosine"), 5)
    assert cosine == pytest.approx([0.1 * (1 + math.cos(math.pi * step / 20)) for step in range(20)])
    cycle = rates(TrainSettings(epochs=4, lr=0.2, schedule="one-cycle"), 5)
    assert cycle[:5] == pytest.approx([0.0, 0.04, 0.08, 0.12, 0.16])
    assert cycle[5:] == pytest.approx([0.1 * (1 + math.cos(math.pi * step / 15)) for step in range(15)])
    assert rates(TrainSettings(epochs=2, lr=0.2, schedule="constant"), 3) == [0.2] * 6


def test_warm_up_rises_first():
    ramp = [0.0, 0.25, 0.5, 0.75]
    step = rates(TrainSettings(epochs=10, lr=1, warm_up=2), 2)
    assert step[:4] == pytest.approx(ramp)
    assert step[4:12] == [1.0] * 8
    assert step[12:16] == pytest.approx([0.1] * 4)
    constant = rates(TrainSettings(epochs=10, lr=1, warm_up=2, schedule="constant"), 2)
    assert constant == pytest.approx(ramp + [1.0] * 16)
    cosine = rates(TrainSettings(epochs=10, lr=1, warm_up=2, schedule="cosine"), 2)
    assert cosine == pytest.approx(ramp + [0.5 + 0.5 * math.cos(math.pi * done / 16) for done in range(16)])
    half = rates(TrainSettings(epochs=10, lr=1, warm_up=0.5, schedule="constant"), 4)
    assert half == pytest.approx([0.0, 0.5] + [1.0] * 38)


def test_beyond_the_ends_the_rate_stays():
    for schedule, last in (("step", 0.001), ("cosine", 0.0), ("one-cycle", 0.0), ("constant", 0.1)):
        settings = TrainSettings(schedule=schedule)
        assert rate(settings, 1.0) == pytest.approx(last)
        assert rate(settings, 1.2) == rate(settings, 1.0)
        assert rate(settings, -0.1) == rate(settings, 0.0)


def test_no_epochs_have_no_rates_and_empty_epochs_are_refused():
    assert rates(TrainSettings(epochs=0), 5) == []
    with pytest.raises(TrainingError, match="an epoch of 0 steps trains nothing; give more images"):
        rates(TrainSettings(), 0)
