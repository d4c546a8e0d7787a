"""Fig. 3 and 4: what is left of every layer of one or several pruned networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ifso.common.plots import BLUE, GREEN, INK, MUTED, PAGE, PALE, draw, empty, key, plain
from ifso.runs.reading import read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ifso.runs.reading import RunRecord

BACKBONE = "backbone.body."
"""Where detectors of torchvision keep the network that others use for classification."""

NUMBERED, NAMED = 32, 80
"""Up to so many layers are shown as channels, with numbers, else in per cent; up to so many have all their names."""


@dataclass(frozen=True)
class Bar:
    """Output channels of a layer before and after; ``coupled`` if other layers must keep the same ones."""

    name: str
    channels: int
    kept: int
    coupled: bool


@dataclass(frozen=True)
class Network:
    """A pruned network, or only ``title`` and the words of what is ``missing``."""

    title: str
    bars: tuple[Bar, ...] = ()
    missing: str = ""


def network_of(folder: Path, title: str | None = None) -> Network:
    """The layers of the run in ``folder``, with what is left of the MACs."""
    run = read_run(folder)
    several = set(run.structure.coupled)
    bars = tuple(
        Bar(layer.name, layer.channels, layer.kept, bool(several.intersection(layer.groups)))
        for layer in run.structure.layers
    )
    name = title or ", ".join(filter(None, (run.model, _short(run.data))))
    return Network(f"{name}: {_costs(run)}", bars, "" if bars else "the run says nothing about its layers")


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


def shared(networks: Sequence[Network]) -> tuple[list[Network], str]:
    """Only the layers that all of them have, if they have any in common; with words about those left out.

    The backbone of a detector counts as the network it was made of.

    >>> bars = Bar("conv1", 64, 32, False), Bar("fc", 10, 10, False)
    >>> found, words = shared([Network("a", bars), Network("b", (Bar("backbone.body.conv1", 64, 64, False),))])
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


def draw_layers(networks: Sequence[Network], stem: Path, title: str) -> tuple[Path, Path]:
    """A panel for each network, one below the other; a bar is a layer, its solid part what is left of it."""
    common, note = shared(networks)
    most = max(len(network.bars) for network in common)
    size = max(PAGE, 0.05 * most), 1.3 + 1.5 * len(common)
    return draw(stem, title, size, lambda figure: _fill(figure, common, note))


def _fill(figure: Figure, networks: Sequence[Network], note: str) -> None:
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


def _bars(axes: Axes, bars: Sequence[Bar], *, named: bool) -> None:
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
