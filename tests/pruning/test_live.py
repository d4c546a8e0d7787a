"""The live view of a run: what a terminal shows is compared as text."""

import io
import json
import math
import time

import pytest
from rich.console import Console

from ifso.common.progress import PER_SECOND
from ifso.pruning.events import Plan, Removal
from ifso.pruning.progress import Bar, Layers, RichProgress, most_changed, sparkline

GROUPS = {"stem": (8, ["stem"]), "block.[red]a": (16, ["block.[red]a"]), "block.b": (4, ["block.b", "skip"])}

LIVE = """\
━━━━╸                 25% MACs 90.0% → 60.0% left 0:00:30 loss 0.5 so far 0:00:10 block.[red]a[2]
stem         ██████████████████████████████     8/8    100%
block.[red]a ████████████████████████████▏·    15/16    94%
block.b      ██████████████████████▌·······     3/4     75%  as in 1 more
loss 1 at first, 0.5 now █▁
"""


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def write_structure(folder, groups):
    folder.mkdir(exist_ok=True)
    document = {
        "shapes": {f"{layer}.weight": [size, 3] for size, layers in groups.values() for layer in layers},
        "frozen": [],
        "groups": [
            {
                "name": name,
                "size": size,
                "flags": [],
                "members": [
                    {"parameter": f"{layer}.weight", "dim": 0, "role": "produces", "positions": size}
                    for layer in layers
                ],
            }
            for name, (size, layers) in groups.items()
        ],
    }
    (folder / "structure.json").write_text(json.dumps(document))
    return folder


def plan(folder, removals=0, macs=1.0):
    return Plan("net", 28, {"macs": 0.6}, {"macs": macs}, removals, None if folder is None else str(folder))


def removal(number, units, macs, loss):
    return Removal(number, number, units, 1e-3, {"macs": macs}, {"macs": macs}, loss, float(number))


def terminal(width, height=30):
    file = io.StringIO()
    return file, Console(
        file=file, force_terminal=True, width=width, height=height, color_system=None, legacy_windows=False
    )


def last_picture(sent):
    """What stays on the screen: all after the last time that the cursor went up to draw anew."""
    text = sent.replace("\x1b[?25h", "").replace("\x1b[?25l", "")
    return "".join(line.rstrip() + "\n" for line in text.rpartition("\x1b[2K")[2].strip("\n").split("\n"))


def shown(folder, width, height=30):
    file, console = terminal(width, height)
    clock = Clock()
    listener = RichProgress(console, clock, refresh=False)
    listener.started(plan(folder))
    clock.now = 5.0
    listener.removed(removal(1, {"block.b": (0,)}, 0.95, 1.0))
    clock.now = 10.0
    listener.removed(removal(2, {"block.[red]a": (2,)}, 0.9, 0.5))
    listener.finished()
    return last_picture(file.getvalue())


def test_every_layer_has_a_bar(tmp_path):
    assert shown(write_structure(tmp_path / "run", GROUPS), 110) == LIVE


def test_a_narrow_terminal_keeps_the_end_of_names(tmp_path):
    picture = shown(write_structure(tmp_path / "run", GROUPS), 36)
    assert max(map(len, picture.splitlines())) <= 36
    assert [line.split()[0] for line in picture.splitlines()[1:4]] == ["stem", "…k.[red]a", "block.b"]
    assert "3/4     75%" in picture


def test_a_flat_terminal_has_the_sum_only(tmp_path):
    picture = shown(write_structure(tmp_path / "run", GROUPS), 110, height=6).splitlines()
    assert picture[1:] == ["3 groups of layers: 93% of their channels left", "loss 1 at first, 0.5 now █▁"]


def test_a_run_without_a_folder_shows_the_line_alone(tmp_path):
    picture = shown(None, 110)
    assert picture == LIVE.splitlines(keepends=True)[0]


def test_300_layers_show_the_most_changed_and_count_the_others(tmp_path):
    names = [f"stage{number // 100}.block{number}.conv" for number in range(300)]
    folder = write_structure(tmp_path / "run", {name: (32, [name]) for name in names})
    file, console = terminal(100, height=14)
    listener = RichProgress(console, Clock(), refresh=False)
    listener.started(plan(folder))
    changed = {names[place]: tuple(range(place // 20 + 1)) for place in range(0, 300, 30)}
    listener.removed(removal(1, changed, 0.9, 0.5))
    listener.finished()
    picture = last_picture(file.getvalue()).splitlines()
    assert len(picture) == 11
    assert [line.split()[0] for line in picture[1:9]] == [names[place] for place in range(60, 300, 30)]
    assert picture[9] == "292 others, less changed: 100% of their channels left"


def test_a_resumed_run_goes_on_with_what_is_left(tmp_path):
    folder = write_structure(tmp_path / "run", GROUPS)
    made = [{"units": {"stem": [0]}, "loss": 2.0}, {"units": {"stem": [3], "block.b": [1]}, "loss": None}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    layers = Layers.of(plan(folder, removals=2, macs=0.8))
    layers.removed(removal(3, {"stem": (5,)}, 0.7, 1.0))
    console = Console(record=True, width=60, file=io.StringIO(), color_system=None)
    console.print(layers)
    text = console.export_text()
    assert "5/8" in text
    assert "3/4" in text
    assert "loss 2 at first, 1 now" in text


@pytest.mark.parametrize("found", ["", "[]", '{"groups": 3}'])
def test_a_structure_that_says_nothing_is_no_obstacle(tmp_path, found):
    (tmp_path / "structure.json").write_text(found)
    assert Layers.of(plan(tmp_path)) is None


def test_only_ascii_where_nothing_else_can_be_shown():
    line = Bar("conv", 8, 4).line(4, 30, plain=True)
    assert line.plain.isascii()
    assert line.plain.split()[1] == "#" * 15 + "." * 15


def test_most_changed_counts_shares_not_units():
    bars = [Bar("wide", 512, 500), Bar("slim", 8, 6), Bar("whole", 64, 64)]
    assert [bar.name for bar in most_changed(bars, 1)] == ["slim"]
    assert most_changed(bars, 0) == []


def test_a_long_curve_shows_means_of_neighbours():
    drawn = sparkline([float(value) for value in range(100)], 8)
    assert 4 <= len(drawn) <= 8
    assert drawn == "".join(sorted(drawn))
    assert (drawn[0], drawn[-1]) == ("▁", "█")
    assert sparkline([1.0, 2.0], 0) == sparkline([], 8) == ""


def test_losses_that_are_no_numbers_leave_no_mark():
    layers = Layers([Bar("conv", 8, 8)])
    for number, loss in enumerate((math.nan, 2.0, math.inf, 1.0), 1):
        layers.removed(removal(number, {"conv": (number,)}, 0.9, loss))
    console = Console(record=True, width=60, file=io.StringIO(), color_system=None)
    console.print(layers)
    assert "loss 2 at first, 1 now █▁" in console.export_text()


def test_drawing_takes_a_small_part_of_the_time(tmp_path):
    """Not more than 8 % of a core, with a margin for busy machines: it is drawn four times a second."""
    names = [f"stage.block{number}.conv" for number in range(300)]
    folder = write_structure(tmp_path / "run", {name: (32, [name]) for name in names})
    _, console = terminal(100, height=50)
    layers = Layers.of(plan(folder))
    best = math.inf
    for _ in range(5):
        start = time.process_time()
        console.print(layers)
        best = min(best, time.process_time() - start)
    assert best * PER_SECOND < 0.08


def test_a_name_from_a_model_is_no_markup(tmp_path):
    folder = write_structure(tmp_path / "run", {"[bold]x[/bold]": (4, ["[bold]x[/bold]"])})
    assert "[bold]x[/bold]" in shown(folder, 80)
