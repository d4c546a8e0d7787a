"""Ctrl-C in the middle of a training, for the tests of ``ifso train`` and ``ifso finetune``."""

from ifso.cli.progress import PlainTrainingProgress
from ifso.training import runs


def interrupt_at(monkeypatch, done):
    """After ``done`` epochs; every epoch before leaves a checkpoint."""
    original = PlainTrainingProgress.stepped

    def stepped(self, name, share):
        original(self, name, share)
        if share >= done:
            raise KeyboardInterrupt

    monkeypatch.setattr(runs, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(PlainTrainingProgress, "stepped", stepped)
