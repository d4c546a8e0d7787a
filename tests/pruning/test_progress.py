"""What a run shows while it goes on: printed lines and bars are compared as text."""

import io
import os
import pty
import signal
import subprocess
import sys
import time
from types import ModuleType

import pytest
from rich.console import Console

from ifso.cli.progress import TensorBoardListener
from ifso.common import distributed as ranks
from ifso.errors import IfsoError
from ifso.pruning import progress as displays
from ifso.pruning.events import Course, Plan, Removal, Silent, Stage
from ifso.pruning.progress import (
    NotebookProgress,
    PlainProgress,
    RichProgress,
    listener_for,
    listeners_as_one,
    progress,
)

SHOW_CURSOR = "\x1b[?25h"
HIDE_CURSOR = "\x1b[?25l"

PLAIN = """\
prune: start model=net units=20 macs=1.0000/0.6 params=1.0000/0.5 folder=runs/a
prune: done=2% removals=1 macs=0.9800/0.6 params=0.9900/0.5 loss=0.1235 unit=l1.[red]c[3] elapsed=0:00:01 left=-:--:--
prune: 3 layers were compacted
prune: done=18% removals=6 macs=0.8800/0.6 params=0.9100/0.5 loss=– unit=l1.[red]c[3] +2 elapsed=0:00:06 left=0:00:25
prune: done=20% removals=7 macs=0.8700/0.6 params=0.9000/0.5 loss=0.1235 unit=l1.[red]c[3] elapsed=0:00:07 left=0:00:30
"""

STAGED = """\
prune: start model=net units=20 macs=1.0000/0.6 stages=4 folder=runs/a
prune: stage=1/4 macs=0.9012/0.6 units=212 accuracy=71.2 top5=90 elapsed=0:00:15 left=0:00:45
prune: about 45 s left
prune: stage=2/4 macs=0.8000/0.6 units=3 elapsed=0:00:25 left=0:00:25
prune: 3 layers were compacted
prune: stage=3/4 macs=0.7000/0.6 units=3 accuracy=64.06 elapsed=0:00:45 left=0:00:15
prune: stage=4/4 macs=0.5990/0.6 units=3 accuracy=60 elapsed=0:01:00 left=0:00:00
"""

RICH_STAGED = [
    "                       0% stage 1/4 MACs 100.0% → 60.0% left -:--:-- so far 0:00:00",
    "━━━━╸                 25% stage 1/4 MACs 90.0% → 60.0% left -:--:-- so far 0:00:10",
    "━━━━╸                 25% stage 2/4 MACs 90.0% → 60.0% left 0:00:45 [b]accuracy 71.2 so far 0:00:15",
    "━━━━━━━━━╸            50% stage 3/4 MACs 80.0% → 60.0% left 0:00:25 [b]accuracy 71.2 so far 0:00:25",
    "━━━━━━━━━━━━━━━━━━━━ 100% stage 4/4 MACs 59.9% → 60.0% left 0:00:00 [b]accuracy 60 so far 0:01:00",
]

RICH = """\
                       0% MACs 100.0% → 60.0% left -:--:-- loss – so far 0:00:00
[bold]3 layers were compacted[/bold]
━━━━╸                 25% MACs 90.0% → 60.0% left -:--:-- loss 0.1235 so far 0:00:10 l1.[red]c[3] +2
"""
NARROW = "━╸        25% MACs 90.0% → 60.0% left -:--:-- loss 0.1235 so fa…\n"
NARROWER = " 25% MACs 90.0% → 60.0% left -:--:-- lo…\n"

INTERRUPTED = """
import signal, sys, time
from ifso.pruning.progress import progress
from ifso.pruning.events import Plan

signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with progress() as listener:
        listener.started(Plan("net", 20, {"macs": 0.6}, {"macs": 1.0}, 0, None))
        time.sleep(60)
except KeyboardInterrupt:
    print("stopped", file=sys.stderr)
"""


class Clock:
    """Time that passes when a test says so."""

    now = 0.0

    def __call__(self):
        return self.now


def plan(removals=0, stages=0, **shares):
    targets = {"macs": 0.6, "params": 0.5} if "params" in shares else {"macs": 0.6}
    return Plan("net", 20, targets, shares or {"macs": 1.0}, removals, "runs/a", stages)


def stage(number, macs, units=3, stages=4, **values):
    return Stage(number, stages, units, {"macs": macs}, values, 0.0)


def removal(number, units=(3,), loss=0.12345, **shares):
    return Removal(number, number, {"l1.[red]c": units}, 1e-3, shares, shares, loss, float(number))


class TestCourse:
    def test_the_target_furthest_from_done_counts(self):
        course = Course(plan(macs=1.0, params=1.0), now=0.0)
        course.moved({"macs": 0.6, "params": 0.9}, now=1.0)
        assert course.done == pytest.approx(0.2)
        course.moved({"macs": 0.9, "params": 0.5}, now=1.0)
        assert course.done == pytest.approx(0.25)

    def test_a_resumed_run_goes_on_where_it_was_and_counts_its_own_time(self):
        course = Course(plan(removals=7, macs=0.8), now=100.0)
        assert course.done == pytest.approx(0.5)
        assert course.left(now=110.0) is None
        course.moved({"macs": 0.75}, now=120.0)
        assert course.left(now=120.0) is None
        course.moved({"macs": 0.7}, now=130.0)
        assert (course.elapsed(130.0), course.left(130.0)) == (30.0, pytest.approx(20.0))

    def test_units_that_go_together_have_waited_together(self):
        """Rounds of 50 units every 10 seconds: the pace is that of rounds, also in the midst of one."""
        course = Course(plan(), now=0.0)
        for number in range(1, 101):
            course.moved({"macs": 1 - 0.002 * number}, now=10.0 * ((number + 49) // 50) + 0.001 * (number % 50))
            if number <= 50:
                assert course.left(now=10.0) is None
            else:
                assert 20 <= course.left(now=20.0) <= 30.1

    def test_a_run_that_slows_down_is_believed(self):
        """100 removals at a tenth of a second each, then 30 that take a second: the late pace counts."""
        course = Course(plan(), now=0.0)
        for number in range(1, 101):
            course.moved({"macs": 1 - 0.002 * number}, now=0.1 * number)
        for number in range(1, 31):
            course.moved({"macs": 0.8 - 0.002 * number}, now=10.0 + number)
        assert course.left(now=40.0) == pytest.approx(70.0)

    def test_overshooting_is_done(self):
        course = Course(plan(), now=0.0)
        course.moved({"macs": 0.598}, now=5.0)
        assert (course.done, course.percent, course.left(9.0)) == (1.0, 100, 0.0)

    def test_per_cent_are_full_ones(self):
        course = Course(plan(), now=0.0)
        course.moved({"macs": 0.6001}, now=5.0)
        assert course.percent == 99


class TestCourseOfStages:
    def test_time_left_is_the_mean_of_the_stages_not_the_pace_of_removals(self):
        course = Course(plan(stages=4), now=0.0)
        for number in range(1, 101):
            course.moved({"macs": 1 - 0.001 * number}, now=5.0 + 0.05 * number)
            assert course.left(now=10.0) is None
        course.staged(stage(1, 0.9), now=10.0)
        assert course.left(now=10.0) == 30.0
        course.staged(stage(2, 0.8), now=40.0)
        assert course.left(now=40.0) == 40.0
        assert course.left(now=45.0) == 35.0
        assert course.left(now=99.0) == 0.0

    def test_a_resumed_run_counts_its_own_stages(self):
        course = Course(plan(removals=300, stages=10, macs=0.8), now=100.0)
        assert course.stage_words == ""
        course.staged(stage(6, 0.76, stages=10), now=107.0)
        assert course.left(now=107.0) == pytest.approx(28.0)
        assert course.stage_words == "stage 7/10"

    def test_a_target_met_early_leaves_nothing(self):
        course = Course(plan(stages=4), now=0.0)
        course.staged(stage(3, 0.6), now=30.0)
        assert (course.left(now=30.0), course.stage_words) == (0.0, "stage 3/4")

    def test_removals_that_meet_the_target_do_not_end_the_last_stage(self):
        """What comes after them, a measure perhaps, belongs to the stage."""
        course = Course(plan(stages=2), now=0.0)
        course.staged(stage(1, 0.8, stages=2), now=30.0)
        course.moved({"macs": 0.599}, now=40.0)
        assert course.left(now=40.0) == 20.0

    def test_a_first_stage_tells_of_a_staged_run_if_the_plan_did_not(self):
        course = Course(plan(), now=0.0)
        assert (course.in_stages, course.stage_words) == (False, "")
        course.staged(stage(1, 0.9), now=10.0)
        assert (course.in_stages, course.stage_words) == (True, "stage 2/4")


def staged_run(listener, clock):
    """Four stages of three removals at a time; the second measures nothing."""
    listener.started(plan(stages=4))
    for number, (ends, macs, units, values) in enumerate(STAGES, 1):
        clock.now = ends - 5.0
        for one in range(3):
            listener.removed(removal(3 * number + one - 2, macs=macs))
        clock.now = ends
        listener.staged(stage(number, macs, units, **values))
        if number == 2:
            listener.said("3 layers were compacted")
    listener.finished()


STAGES = (
    (15.0, 0.9012, 212, {"accuracy": 71.2, "top5": 90.0}),
    (25.0, 0.8, 3, {}),
    (45.0, 0.7, 3, {"accuracy": 64.0625}),
    (60.0, 0.599, 3, {"accuracy": 60.0}),
)


def test_a_staged_run_has_a_line_for_each_stage_and_one_with_the_time_left():
    file, clock = io.StringIO(), Clock()
    staged_run(PlainProgress(file, clock), clock)
    assert file.getvalue() == STAGED


def test_a_plan_without_stages_costs_one_line_about_removals():
    file, clock = io.StringIO(), Clock()
    listener = PlainProgress(file, clock)
    listener.started(plan())
    for number in (1, 2, 3, 4):
        clock.now = 10.0 * number
        for one in range(3):
            listener.removed(removal(3 * number + one - 2, macs=1 - 0.09 * number))
        listener.staged(stage(number, 1 - 0.09 * number))
    listener.finished()
    words = [line.split()[1] for line in file.getvalue().splitlines()]
    assert words == ["start", "done=22%", "stage=1/4", "about", "stage=2/4", "stage=3/4", "stage=4/4"]


def test_a_single_stage_leaves_nothing_to_estimate():
    file, clock = io.StringIO(), Clock()
    listener = PlainProgress(file, clock)
    listener.started(plan(stages=1))
    clock.now = 10.0
    listener.staged(stage(1, 0.6, stages=1))
    assert [line.split()[1] for line in file.getvalue().splitlines()] == ["start", "stage=1/1"]


def test_the_bar_of_a_staged_run_shows_stages_and_what_was_measured():
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, force_terminal=True, width=110, color_system=None, legacy_windows=False)
    listener = RichProgress(console, clock, refresh=False)
    listener.started(plan(stages=4))
    seen = [drawn(listener)]
    for now, tell, event in (
        (10.0, listener.removed, removal(1, macs=0.9)),
        (15.0, listener.staged, stage(1, 0.9, **{"[b]accuracy": 71.2})),
        (25.0, listener.staged, stage(2, 0.8)),
        (60.0, listener.staged, stage(4, 0.599, **{"[b]accuracy": 60.0})),
    ):
        clock.now = now
        tell(event)
        seen.append(drawn(listener))
    listener.finished()
    assert seen == RICH_STAGED


def drawn(listener):
    """Its bar as it is now."""
    file = io.StringIO()
    console = Console(file=file, width=110, color_system=None, force_terminal=True, legacy_windows=False)
    console.print(listener._progress)
    return file.getvalue().rstrip()


class Cell:
    """Stands for ``IPython.display``: what a cell of a notebook shows."""

    def __init__(self, monkeypatch):
        self.shown, self.others = [], []
        module = ModuleType("IPython.display")
        module.display = self.display
        monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
        monkeypatch.setitem(sys.modules, "IPython.display", module)

    def display(self, thing, display_id=None):
        if display_id is None:
            return self.others.append(thing.text)
        self.update(thing)
        return self

    def update(self, thing):
        bundle = thing._repr_mimebundle_(None, None)
        assert bundle["text/html"].startswith("<pre")
        self.shown.append(bundle["text/plain"].rstrip())


class TestNotebook:
    @pytest.fixture
    def console(self, monkeypatch):
        console = Console(force_jupyter=True, width=110, color_system=None, markup=False, highlight=False)
        monkeypatch.setattr("rich.jupyter.get_console", lambda: console)
        return console

    def test_one_output_is_drawn_anew_at_stages(self, monkeypatch, console):
        cell, clock = Cell(monkeypatch), Clock()
        staged_run(NotebookProgress(console, clock), clock)
        assert "stage 1/4 MACs 100.0%" in cell.shown[0]
        assert any("stage 2/4" in shown and "accuracy 71.2 top5 90" in shown for shown in cell.shown)
        assert "stage 4/4" in cell.shown[-1]
        assert cell.others == ["3 layers were compacted\n"]

    def test_removals_draw_a_few_times_per_second(self, monkeypatch, console):
        cell, clock = Cell(monkeypatch), Clock()
        listener = NotebookProgress(console, clock)
        listener.started(plan())
        for number in range(1, 1001):
            clock.now = 0.002 * number
            listener.removed(removal(number, macs=1 - 0.0001 * number))
        listener.finished()
        listener.finished()
        assert len(cell.shown) == 1 + 8 + 1
        assert "MACs 90.0%" in cell.shown[-1]

    def test_an_interrupt_before_the_output_is_there(self, monkeypatch, console):
        cell = Cell(monkeypatch)
        monkeypatch.setattr(sys.modules["IPython.display"], "display", interrupt)
        listener = NotebookProgress(console, Clock())
        with pytest.raises(KeyboardInterrupt):
            listener.started(plan())
        listener.finished()
        assert cell.shown == []


class TestListenerFor:
    """Which display it is, by what standard error is; and who else hears of the run."""

    def test_lines_where_there_is_no_terminal(self, capsys):
        for asked in (None, True):
            assert type(listener_for(asked, None)) is PlainProgress

    def test_a_bar_on_a_terminal(self, monkeypatch):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        assert type(listener_for(None, None)) is RichProgress
        monkeypatch.setenv("TERM", "dumb")
        assert type(listener_for(None, None)) is PlainProgress

    def test_a_notebook(self, monkeypatch):
        monkeypatch.setattr(displays, "stderr_console", lambda: Console(force_jupyter=True))
        assert type(listener_for(None, None)) is NotebookProgress

    def test_nothing_without_standard_error(self, monkeypatch):
        monkeypatch.setattr(sys, "stderr", None)
        assert type(listener_for(True, None)) is Silent

    def test_a_listener_takes_the_place_of_the_display_unless_asked(self, capsys):
        file, own = io.StringIO(), Silent()
        assert listener_for(None, own) is own
        assert listener_for(False, own) is own
        assert type(listener_for(False, None)) is Silent
        both = listener_for(True, PlainProgress(file, Clock()))
        both.started(plan())
        assert file.getvalue() == capsys.readouterr().err != ""

    def test_only_the_first_of_several_processes_shows_it(self, monkeypatch):
        own = Silent()
        monkeypatch.setattr(ranks, "rank", lambda: 1)
        assert type(listener_for(None, None)) is Silent
        assert listener_for(True, own) is own


def test_plain_lines_come_first_last_and_every_few_seconds():
    file, clock = io.StringIO(), Clock()
    listener = PlainProgress(file, clock)
    listener.started(plan(macs=1.0, params=1.0))
    for number, (macs, params) in enumerate([(0.98, 0.99), (0.96, 0.97), (0.95, 0.95), (0.92, 0.93), (0.9, 0.92)], 1):
        clock.now += 1
        listener.removed(removal(number, macs=macs, params=params))
    listener.said("3 layers were compacted")
    clock.now += 1
    listener.removed(removal(6, units=(3, 5, 8), loss=float("nan"), macs=0.88, params=0.91))
    clock.now += 1
    listener.removed(removal(7, macs=0.87, params=0.9))
    listener.finished()
    listener.finished()
    assert file.getvalue() == PLAIN


def test_the_removal_that_meets_the_target_is_told_at_once():
    file = io.StringIO()
    listener = PlainProgress(file, Clock())
    listener.started(plan())
    for number, share in enumerate((0.9, 0.7, 0.59), 1):
        listener.removed(removal(number, macs=share))
    listener.said("checked")
    listener.finished()
    assert [line.split()[1] for line in file.getvalue().splitlines()] == ["start", "done=25%", "done=100%", "checked"]


def test_a_resumed_run_says_so():
    file = io.StringIO()
    PlainProgress(file).started(plan(removals=7, macs=0.8))
    assert file.getvalue() == "prune: start model=net units=20 macs=0.8000/0.6 resumed_at=7 folder=runs/a\n"


def draw(width):
    """The bar on a terminal of that width, as the characters that were sent to it."""
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, force_terminal=True, width=width, color_system=None, legacy_windows=False)
    listener = RichProgress(console, clock, refresh=False)
    listener.started(plan())
    clock.now = 10.0
    listener.said("[bold]3 layers were compacted[/bold]")
    listener.removed(removal(1, units=(3, 4, 5), macs=0.9))
    listener.finished()
    return file.getvalue()


def on_screen(sent):
    """What stays on the screen: a line that is erased and drawn again counts once."""
    text = sent.replace(HIDE_CURSOR, "").replace(SHOW_CURSOR, "")
    return "".join(line.rpartition("\r\x1b[2K")[2].rstrip() + "\n" for line in text.split("\n")[:-1])


def test_the_bar_reads_no_markup_in_names():
    sent = draw(width=110)
    first = sent.partition("\r")[0].removeprefix(HIDE_CURSOR).rstrip() + "\n"
    assert first + on_screen(sent) == RICH
    assert sent.startswith(HIDE_CURSOR)
    assert sent.endswith(SHOW_CURSOR)


def test_an_interrupt_while_the_bar_is_set_up_gives_the_cursor_back(monkeypatch):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, color_system=None, legacy_windows=False)
    monkeypatch.setattr(console, "push_render_hook", interrupt)
    listener = RichProgress(console, Clock(), refresh=False)
    with pytest.raises(KeyboardInterrupt):
        listener.started(plan())
    listener.finished()
    assert file.getvalue().endswith(SHOW_CURSOR)


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_a_narrow_terminal_cuts_the_end_of_the_line_off():
    assert on_screen(draw(width=64)).splitlines(keepends=True)[-1] == NARROW
    assert on_screen(draw(width=40)).splitlines(keepends=True)[-1] == NARROWER


class TestSeveral:
    def test_everyone_hears_of_the_end_even_if_one_fails(self):
        ended = []

        class Fine(Silent):
            def finished(self):
                ended.append(self)

        class Failing(Fine):
            def finished(self):
                super().finished()
                raise OSError("disk full")

        all_of_them = Fine(), Failing(), Fine()
        with pytest.raises(OSError, match="disk full"):
            listeners_as_one(all_of_them).finished()
        assert set(ended) == set(all_of_them)

    def test_each_is_told_everything(self):
        files = io.StringIO(), io.StringIO()
        listener = listeners_as_one([PlainProgress(file, Clock()) for file in files])
        listener.started(plan())
        listener.said("word")
        listener.removed(removal(1, macs=0.9))
        listener.staged(stage(4, 0.6))
        assert files[0].getvalue() == files[1].getvalue()
        words = [line.split()[1] for line in files[0].getvalue().splitlines()]
        assert words == ["start", "word", "done=25%", "stage=4/4"]


def test_without_a_terminal_lines_are_printed_and_the_last_one_in_any_case(capsys):
    def interrupted():
        with progress() as listener:
            listener.started(plan())
            listener.removed(removal(1, macs=0.9))
            listener.removed(removal(2, macs=0.8))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split()[1] for line in captured.err.splitlines()] == ["start", "done=25%", "done=50%"]


def test_an_interrupt_gives_the_cursor_back():
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdin=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        sent = read_until(ours, "left -:--:--")
        process.send_signal(signal.SIGINT)
        sent += read_until(ours, "stopped")
    os.close(ours)
    assert "MACs 100.0% → 60.0%" in sent
    assert sent.rindex(SHOW_CURSOR) > sent.rindex(HIDE_CURSOR)
    assert sent.rindex("stopped") > sent.rindex(SHOW_CURSOR)
    assert process.returncode == 0


def read_until(descriptor, text, seconds=30.0):
    """What a terminal shows until ``text`` appears."""
    found, end = b"", time.monotonic() + seconds
    while text.encode() not in found:
        assert time.monotonic() < end, found
        try:
            found += os.read(descriptor, 4096)
        except OSError:
            pytest.fail(f"closed after {found}")
    return found.decode()


class TestTensorBoard:
    def test_a_missing_package_is_one_line(self, tmp_path, monkeypatch):
        monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
        monkeypatch.setitem(sys.modules, "tensorboard", None)
        with pytest.raises(IfsoError) as caught:
            TensorBoardListener(tmp_path)
        assert str(caught.value) == '--tensorboard needs a package: pip install "ifso[tensorboard]"'

    def test_scalars_by_removal(self, tmp_path):
        pytest.importorskip("tensorboard")
        self.record(tmp_path, plan(), [removal(1, macs=0.9), removal(2, loss=0.5, macs=0.8)])
        found = self.read(tmp_path)
        assert found["share/macs"] == [(0, 1.0), (1, pytest.approx(0.9)), (2, pytest.approx(0.8))]
        assert found["loss"] == [(1, pytest.approx(0.12345)), (2, 0.5)]
        assert found["score"] == [(1, pytest.approx(1e-3)), (2, pytest.approx(1e-3))]
        assert found["seconds"] == [(1, 1.0), (2, 2.0)]

    def test_what_stages_measured_stands_at_their_last_removal(self, tmp_path):
        pytest.importorskip("tensorboard")
        events = [removal(1, macs=0.9), removal(2, macs=0.8), stage(1, 0.8, accuracy=70.0), removal(3, macs=0.7)]
        self.record(tmp_path, plan(stages=4), [*events, stage(2, 0.7), stage(3, 0.7, accuracy=65.5)])
        found = self.read(tmp_path)
        assert found["stage"] == [(2, 1.0), (3, 2.0), (3, 3.0)]
        assert found["measure/accuracy"] == [(2, 70.0), (3, 65.5)]

    def test_a_resumed_run_hides_what_lies_beyond(self, tmp_path):
        pytest.importorskip("tensorboard")
        self.record(tmp_path, plan(), [removal(1, macs=0.9), removal(2, macs=0.8)])
        time.sleep(1.1)
        self.record(tmp_path, plan(removals=1, macs=0.9), [removal(2, macs=0.7)])
        assert self.read(tmp_path)["share/macs"] == [(0, 1.0), (1, pytest.approx(0.9)), (2, pytest.approx(0.7))]

    def test_nothing_is_made_before_the_run_starts(self, tmp_path):
        pytest.importorskip("tensorboard")
        TensorBoardListener(tmp_path / "run").finished()
        assert not (tmp_path / "run").exists()

    @staticmethod
    def record(folder, plan, events):
        listener = TensorBoardListener(folder)
        listener.started(plan)
        for event in events:
            (listener.staged if isinstance(event, Stage) else listener.removed)(event)
        listener.finished()

    @staticmethod
    def read(folder):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder)).Reload()
        return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
