"""``ifso repro draw``: the figures of the paper as SVG and PNG, from what was run, and a note of what was not.

Fig. 3 and 4 show what is left of every layer of one or several pruned networks; the others have modules of their own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.cli.console import print_json, say
from ifso.common.text import one_line
from ifso.errors import IfsoError
from ifso.runs.reading import read_run
from ifso_repro.cli import FIGURE1
from ifso_repro.config import find_row, rows, study
from ifso_repro.curves import PLACES, Plot, draw_study, load, plot
from ifso_repro.figure1.networks import NETWORKS
from ifso_repro.figure1.summary import draw_loss_change
from ifso_repro.jobs import Job
from ifso_repro.plots import BLUE, GREEN, INK, MUTED, PAGE, PALE, draw, empty, key, plain
from ifso_repro.schema import RECIPES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ifso.runs.reading import RunRecord

BACKBONE = "backbone.body."
"""Where detectors of torchvision keep the network that others use for classification."""

NUMBERED, NAMED = 32, 80
"""Up to so many layers are shown as channels, with numbers, else in per cent; up to so many have all their names."""


@dataclass(frozen=True)
class LayerBar:
    """Output channels of a layer before and after; ``coupled`` if other layers must keep the same ones."""

    name: str
    channels: int
    kept: int
    coupled: bool


@dataclass(frozen=True)
class NetworkBars:
    """A pruned network, or only ``title`` and the words of what is ``missing``."""

    title: str
    bars: tuple[LayerBar, ...] = ()
    missing: str = ""


def network_of(folder: Path, title: str | None = None) -> NetworkBars:
    """The layers of the run in ``folder``, with what is left of the MACs."""
    run = read_run(folder)
    several = set(run.structure.coupled)
    bars = tuple(
        LayerBar(layer.name, layer.channels, layer.kept, bool(several.intersection(layer.groups)))
        for layer in run.structure.layers
    )
    name = title or ", ".join(filter(None, (run.model, _short(run.data))))
    return NetworkBars(f"{name}: {_costs(run)}", bars, "" if bars else "the run says nothing about its layers")


def _short(data: str | None) -> str | None:
    """DATA without its folders.

    >>> _short("cifar10:/home/me/cifar10.npz"), _short("sets/mine.py:make")
    ('cifar10', 'mine.py:make')
    """
    if data is None:
        return None
    name, _, rest = data.partition(":")
    return f"{Path(name).name}:{rest}" if name.endswith(".py") else name


def _costs(run: RunRecord) -> str:
    shares = run.shares
    costs = [f"{shares[kind]:.1%} of {words}" for kind, words in (("macs", "MACs"), ("params", "weights"))
            if kind in shares]  # fmt: skip
    return ("kept " if costs else "") + ", ".join(costs) + ("" if run.finished else " (run not finished)")


def shared(networks: Sequence[NetworkBars]) -> tuple[list[NetworkBars], str]:
    """Only the layers that all of them have, if they have any in common; with words about those left out.

    The backbone of a detector counts as the network it was made of.

    >>> bars = LayerBar("conv1", 64, 32, False), LayerBar("fc", 10, 10, False)
    >>> other = LayerBar("backbone.body.conv1", 64, 64, False)
    >>> found, words = shared([NetworkBars("a", bars), NetworkBars("b", (other,))])
    >>> [bar.name for network in found for bar in network.bars], words
    (['conv1', 'conv1'], 'Layers that only one of them has are left out: 1 of a.')
    """
    plain = [
        replace(network, bars=tuple(replace(bar, name=bar.name.removeprefix(BACKBONE)) for bar in network.bars))
        for network in networks
    ]
    names = [{bar.name for bar in network.bars} for network in plain if network.bars]
    common = set.intersection(*names) if names else set()
    if len(names) < 2 or not common:
        return list(networks), ""
    reduced = [replace(each, bars=tuple(bar for bar in each.bars if bar.name in common)) for each in plain]
    lost = [(len(one.bars) - len(other.bars), one.title) for one, other in zip(plain, reduced, strict=True)]
    words = ", ".join(f"{count} of {title.partition(':')[0]}" for count, title in lost if count)
    return reduced, f"Layers that only one of them has are left out: {words}." if words else ""


def draw_layers(networks: Sequence[NetworkBars], stem: Path, title: str) -> tuple[Path, Path]:
    """A panel for each network, one below the other; a bar is a layer, its solid part what is left of it."""
    common, note = shared(networks)
    most = max(len(network.bars) for network in common)
    size = max(PAGE, 0.05 * most), 1.3 + 1.5 * len(common)
    return draw(stem, title, size, lambda figure: _fill(figure, common, note))


def _fill(figure: Figure, networks: Sequence[NetworkBars], note: str) -> None:
    from matplotlib.patches import Patch

    grid = figure.subplots(len(networks), 1, squeeze=False)[:, 0]
    names = [[bar.name for bar in network.bars] for network in networks]
    for number, (axes, network) in enumerate(zip(grid, networks, strict=True)):
        axes.set_title(plain(network.title), loc="left")
        if network.missing:
            empty(axes, plain(network.missing))
            axes.set_xticks([])
        else:
            _bars(axes, network.bars, named=names[number] not in names[number + 1 :])
    handles: list[Any] = [Patch(facecolor=BLUE, label="kept")]
    if any(bar.coupled for network in networks for bar in network.bars):
        handles.append(Patch(facecolor=GREEN, hatch="////", label="kept, the same channels as in other layers"))
    handles.append(Patch(facecolor="none", edgecolor=MUTED, linewidth=0.7, label="removed"))
    key(figure, handles, [note] if note else [])


def _bars(axes: Axes, bars: Sequence[LayerBar], *, named: bool) -> None:
    """In channels if there is room for numbers, else in per cent of each layer."""
    positions, numbers = range(len(bars)), len(bars) <= NUMBERED
    scale = [1.0 if numbers else 100 / bar.channels for bar in bars]
    whole = [bar.channels * factor for bar, factor in zip(bars, scale, strict=True)]
    axes.bar(positions, whole, width=0.8, color="none", edgecolor=MUTED, linewidth=0.6)
    for coupled, color, hatch in ((False, BLUE, ""), (True, GREEN, "////")):
        chosen = [position for position in positions if bars[position].coupled == coupled]
        axes.bar(chosen, [bars[p].kept * scale[p] for p in chosen], width=0.8, color=color, hatch=hatch)
    for position, bar in enumerate(bars if numbers else ()):
        axes.annotate(
            f"{bar.kept}", (position, bar.channels), xytext=(0, 1.5), textcoords="offset points", ha="center",
            fontsize=6, color=INK if bar.kept < bar.channels else MUTED,
        )  # fmt: skip
    step = 1 if len(bars) <= NAMED else -(-len(bars) // NAMED)
    labels = [plain(bar.name) if named else "" for bar in bars]
    axes.set_xticks(list(positions)[::step], labels[::step], rotation=90, fontsize=6.5 if numbers else 5)
    axes.set_xlim(-0.7, len(bars) - 0.3)
    axes.set_ylabel("channels" if numbers else "channels kept (%)")
    axes.grid(visible=False, axis="x")
    axes.tick_params(axis="x", length=2, color=PALE)


OUT, FIGURE1_OUT = Path("repro"), Path(f"ifso-{FIGURE1}")
STRUCTURES: Mapping[str, tuple[str, ...]] = {
    "figure3": ("vgg16-cifar10-70",),
    "figure4": ("resnet50-imagenet-50", "retinanet-coco-50"),
}
"""The rows whose pruned networks Fig. 3 and 4 show."""

TITLES = {"figure3": "Pruned VGG-16 (Fig. 3)", "figure4": "Pruned ResNet-50, two tasks (Fig. 4)"}
FIGURES = (FIGURE1, *STRUCTURES, *PLACES)


class NothingToDraw(IfsoError):
    """A figure of which nothing was run; the message names the command that makes its data."""


@dataclass(frozen=True)
class Source:
    """Where the data are: the folder of ``ifso repro``, that of its figure 1, and ``runs`` for Fig. 3 and 4."""

    out: Path
    figure1: Path
    runs: tuple[Path, ...] = ()
    recipe: str | None = None
    criteria: Sequence[str] | None = None
    smoke: bool = False

    @property
    def pictures(self) -> Path:
        """Where pictures go; those of smoke runs lie apart."""
        return self.out / "figures" / ("smoke" if self.smoke else "")


@dataclass(frozen=True)
class Drawn:
    """A figure, its files, and what of it was not run."""

    figure: str
    files: tuple[Path, ...]
    missing: tuple[str, ...] = ()


def draw_figure(name: str, source: Source) -> Drawn:
    """Draw a figure from what was run; NothingToDraw if nothing was."""
    kinds = {FIGURE1: _loss_change, **dict.fromkeys(STRUCTURES, _structure), **dict.fromkeys(PLACES, _study)}
    if name not in kinds:
        raise IfsoError(f"{name!r} is no figure that can be drawn; choose from {', '.join(FIGURES)}")
    return kinds[name](name, source)


def _loss_change(name: str, source: Source) -> Drawn:
    path = source.figure1 / "figure1.json"
    if not path.is_file():
        raise NothingToDraw(f"{path} is not there; make it with: ifso repro figure1 --out {source.figure1}")
    document = _document(path)
    run = {network["name"] for network in document["networks"]}
    left_out = tuple(network for network in NETWORKS if network not in run)
    return Drawn(name, draw_loss_change(document, source.figure1 / name), left_out)


def _document(path: Path) -> dict[str, Any]:
    """A whole document of the study."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise IfsoError(f"{path} is damaged ({one_line(error)}); run ifso repro figure1 again") from error
    keys = ("networks", "summary", "settings", "default_path_steps")
    if not isinstance(document, dict) or document.get("study") != FIGURE1 or not all(document.get(key) for key in keys):
        raise IfsoError(f"{path} is no result of ifso repro figure1; run that again")
    return document


def _study(name: str, source: Source) -> Drawn:
    runs = load(source.out / "results", smoke=source.smoke)

    def shown(recipe: str | None) -> Plot:
        return plot(name, runs, recipe=recipe, criteria=source.criteria, smoke=source.smoke)

    chosen = shown(source.recipe)
    if not chosen.run:
        other = next((recipe for recipe in RECIPES if shown(recipe).run), None)
        hint = f"; draw what there is with --recipes {other}" if other else ""
        folder = source.out / "results" / ("smoke" if source.smoke else "")
        make = f"make them with: {command(name, source)}"
        raise NothingToDraw(f"{folder} has no results of {name} with recipe {chosen.recipe!r}; {make}{hint}")
    own = study(name, seeds=1)[0].recipe
    stem = source.pictures / (name if chosen.recipe == own else f"{name}-{chosen.recipe}")
    missing = [f"{panel.title}: {panel.missing}" for panel in chosen.panels if panel.missing]
    return Drawn(name, draw_study(chosen, stem), tuple(missing))


def command(name: str, source: Source) -> str:
    """The command that runs a study or a row, as it must be given at least.

    >>> command("figure7", Source(Path("repro"), Path()))
    'ifso repro figure7 --data cifar10:PATH --weights DIR'
    """
    words = ["ifso", "repro", name]
    jobs = study(name, seeds=1)
    if source.smoke:
        words.append("--smoke")
    else:
        words += [word for data in dict.fromkeys(job.row.data for job in jobs) for word in ("--data", f"{data}:PATH")]
        words += ["--weights", "DIR"] if any(job.row.base.weights for job in jobs) else []
    return " ".join([*words, *(["--out", str(source.out)] if source.out != Path("repro") else [])])


def _structure(name: str, source: Source) -> Drawn:
    if source.runs:
        networks = [network_of(folder) for folder in source.runs]
        return Drawn(name, draw_layers(networks, source.pictures / name, "Channels kept of every layer"))
    networks, missing = [], []
    smoke = " (SMOKE RUN, which means nothing)" if source.smoke else ""
    for row in STRUCTURES[name]:
        folder = _pruned(row, source)
        if folder is not None:
            networks.append(network_of(folder, row + smoke))
        else:
            missing.append(f"{row}: not run")
            why = f"not run: {command(row, source)}" if row in rows() else "not run"
            networks.append(NetworkBars(row, missing=why))
    if len(missing) == len(networks):
        row = STRUCTURES[name][0]
        raise NothingToDraw(
            f"{source.out / 'work'} has no pruned {row}; make it with: {command(row, source)} --criteria ifso "
            f"--seeds 1, or give a run of ifso prune: ifso repro draw {name} --runs RUN"
        )
    return Drawn(name, draw_layers(networks, source.pictures / name, TITLES[name]), tuple(missing))


def _pruned(row: str, source: Source) -> Path | None:
    """The folder in which a row was pruned by the paper's method with seed 0; None if it was not."""
    from ifso_repro.workspace import Workspace

    if row not in rows():
        return None
    space = Workspace(source.out / "work" / ("smoke" if source.smoke else ""), source.out, smoke=source.smoke)
    folder = space.pruned_folder(Job(find_row(row), "ifso", "paper"))
    return folder if (folder / "config.json").is_file() else None


def run(args: argparse.Namespace) -> int:
    """Draw the figures that were named, or all of which something was run."""
    if args.recipes and len(args.recipes) > 1:
        raise IfsoError(f"--recipes {' '.join(args.recipes)}: a picture shows one of them; draw it once for each")
    if args.runs and (not args.studies or not set(args.studies) <= set(STRUCTURES)):
        raise IfsoError(f"--runs shows the layers of runs: name {' or '.join(STRUCTURES)}, and nothing else")
    recipe, runs = args.recipes[0] if args.recipes else None, tuple(args.runs or ())
    source = Source(args.out or OUT, args.out or FIGURE1_OUT, runs, recipe, args.criteria, args.smoke)
    figures = _drawn(list(dict.fromkeys(args.studies)), source)
    if args.json:
        listed = [{"figure": d.figure, "files": [str(f) for f in d.files], "not_run": list(d.missing)} for d in figures]
        print_json({"figures": listed})
        return 0
    for each in figures:
        print(f"{each.figure}: {', '.join(map(str, each.files))}")
        for words in each.missing:
            print(f"  not run: {words}")
    return 0


def _drawn(names: Sequence[str], source: Source) -> list[Drawn]:
    """The figures of these names, all of which must have been run; without names, those of which something was."""
    if names:
        return [draw_figure(name, source) for name in names]
    figures = []
    for name in FIGURES:
        try:
            figures.append(draw_figure(name, source))
        except NothingToDraw as error:
            say(f"{name}: {error}")
    if not figures:
        raise NothingToDraw(f"there is nothing to draw in {source.out}; say with --out where results are")
    return figures
