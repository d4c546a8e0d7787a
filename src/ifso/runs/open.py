"""A run folder opened again by the commands that come after ``ifso prune``: its data and its networks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ifso.common.files import exists, is_folder
from ifso.data import Data, open_data
from ifso.errors import RunError
from ifso.models.registry import network_for, without_loading
from ifso.runs.arguments import (
    FINETUNE,
    PATHS,
    came_with,
    opened_with,
    parts_of,
    places_of,
    pruning_of,
    refuse_foreign,
    refuse_no_network,
    run_around,
    told_names,
    told_options,
)
from ifso.runs.files import CONFIG, SUMMARY, TRAINING, is_there, read_config, refuse_other_files
from ifso.runs.values import at
from ifso.surgery.recipe import digest_of
from ifso.surgery.store import RECIPE, load, read_recipe, refuse_failed_run


@dataclass(frozen=True)
class OpenedRun:
    """A finished pruning run.

    ``arguments`` are the options that ``ifso prune`` was given, by name; of a run that Python began (``by_python``)
    they are the names that ``about=`` of ``ifso.prune`` told, if any.
    ``digest`` tells the weights that the run began with from others; None where only a network was saved. ``tuned`` is
    the folder of its fine-tuning, if that is another than the customary one. ``told`` are the arguments that whoever
    opens the run has given. ``unverified``: they take its networks even if a check of them failed.
    """

    folder: Path
    arguments: Mapping[str, Any]
    digest: str | None = None
    tuned: Path | None = None
    told: frozenset[str] = frozenset()
    unverified: bool = False
    by_python: bool = False

    @property
    def finetune(self) -> Path:
        """Where its fine-tuning is, or will be."""
        return self.folder / FINETUNE if self.tuned is None else self.tuned

    @property
    def finetuning(self) -> str:
        """``"none"``, ``"unfinished"`` or ``"finished"``, as is a network that ``ifso.save`` wrote there."""
        place = self.finetune
        if (place / SUMMARY).is_file():
            return "finished"
        if (place / CONFIG).exists():
            return "unfinished"
        return "finished" if (place / RECIPE).is_file() else "none"

    @property
    def set_apart(self) -> dict[str, Any]:
        """``validation`` and ``seed`` of the images that its fine-tuning was not shown; empty if it was shown all."""
        if not (self.finetune / CONFIG).is_file():
            return {}
        settings = read_config(self.finetune / CONFIG)["settings"]
        apart, training = settings.get("validation"), settings.get(TRAINING)
        return {"validation": apart, "seed": training.get("seed", 0)} if apart and isinstance(training, dict) else {}

    def open_data(
        self,
        *,
        device: Any = "cpu",
        data: str | None = None,
        seed: int | None = None,
        validation: float | int = 0,
        **options: Any,
    ) -> Data:
        """The data of the run, or ``data`` in its place; ``options`` are those of :func:`ifso.data.open_data`."""
        seed = self.arguments.get("seed", 0) if seed is None else seed
        name = self.there("data") if data is None else data
        return open_data(name, device=device, seed=seed, validation=validation, **options)

    def original(
        self, *, device: Any = "cpu", weights: str | None = None, pretrained: bool = False, data: Data | None = None
    ) -> nn.Module:
        """The network before pruning, with the weights that the run began with; ``weights`` says where they are now.

        ``pretrained``: they are published ones. ``data`` saves opening that of the run, which says how many classes
        there are.
        """
        if weights is None and "weights" in self.arguments:
            weights = self.there("weights")
        if weights is None and self.digest is None and not pretrained:
            raise RunError(f"{self.folder} does not tell the weights before pruning; give them with --weights")
        model = self._network(data, weights, pretrained=pretrained).to(device)
        if self.digest not in (None, digest_of(model)):
            which = f"{weights} does not hold" if weights else f"{self.arguments['model']} does not come with"
            raise RunError(
                f"{which} the weights that the run in {self.folder} began with; "
                "give those with --weights, or --pretrained if they are published"
            )
        return model

    def pruned(self, device: Any = "cpu", *, data: Data | None = None) -> nn.Module:
        """The network as ``ifso prune`` left it."""
        return self._loaded(self.folder, device, data)

    def finetuned(self, device: Any = "cpu", *, data: Data | None = None) -> nn.Module | None:
        """The network after ``ifso finetune``, or None if that was not done or has not come to its end."""
        if self.finetuning != "finished":
            return None
        if not self.unverified:
            self._refuse_other_start(data)
        return self._loaded(self.finetune, device, data)

    def _refuse_other_start(self, data: Data | None) -> None:
        """RunError if the fine-tuning began with another pruned network than the run holds now."""
        place = self.finetune / CONFIG
        if not place.is_file():
            self.refuse_other_units()
            return
        config = read_config(place)
        refuse_other_files(self.finetune, config)
        began = config["settings"].get("weights")
        if began not in (None, digest_of(self.pruned(data=data))):
            raise RunError(
                f"{self.finetune} began with another network than {self.folder} holds now; "
                "give the run it belongs to, or fine-tune again"
            )

    def refuse_other_units(self) -> None:
        """RunError if the fine-tuned network does not have the units that the pruned one has."""
        if not self.unverified and read_recipe(self.finetune).shapes != read_recipe(self.folder).shapes:
            raise RunError(
                f"{self.finetune} holds a network of other sizes than {self.folder}; "
                "give the run that it was pruned in, or fine-tune again"
            )

    def _loaded(self, folder: Path, device: Any, data: Data | None) -> nn.Module:

        return load(folder, self._network(data, None).to(device), unverified=self.unverified)

    def _network(self, data: Data | None, weights: str | None, *, pretrained: bool = False) -> nn.Module:
        """A new network on the CPU, made as ``ifso prune`` makes it: the seed fixes weights that no file gives.

        Options of MODEL that load others are left out, unless whoever opens the run has given them and wants that.
        """
        name = self.there("model")
        if not (pretrained and "model" in self.told):
            name = without_loading(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.arguments.get("seed", 0))
            classes = (self.open_data() if data is None else data).num_classes
            return network_for(name, classes, weights=weights, pretrained=pretrained)

    def there(self, option: str) -> str:
        """The value of an option, with a path that leads there from here."""
        said = option.replace("_", "-")
        if not isinstance(self.arguments.get(option), str):
            once = f', or tell it once: ifso.prune(…, about={{"{option}": …}})' if self.by_python else ""
            raise RunError(f"{self.folder} does not say which {said} it was made with; give --{said}{once}")
        value = self.arguments[option]
        before, path, after = parts_of(option, value)
        if path is None:
            return value

        places = list(places_of(self.folder, path))
        for place in places:
            if exists(place):
                self._refuse_program(option, path, place, after)
                return f"{before}{place}{after}"
        tried = ", ".join(map(str, places))
        raise RunError(
            f"the run in {self.folder} was made with --{said} {value}, which is not there any more (tried {tried}); "
            f"say with --{said} where it is now"
        )

    def _refuse_program(self, option: str, path: str, place: Path, factory: str) -> None:
        """RunError for a program in the run, or one that is found only from there: who sent the run may have sent it.

        One that the name leads to from here is the user's own.
        """
        if option in self.told or not path.endswith(".py"):
            return
        if place != Path(path):
            raise RunError(came_with(self.folder, option, f"{place}{factory}"))
        opened = opened_with(self.folder, self.arguments)
        refuse_foreign(option, f"{place}{factory}", [*opened, self.finetune])


def holds_network(name: str) -> bool:
    """Return whether a MODEL or ``--weights`` is the folder of a run, of a training, or of a saved network."""
    return is_folder(name) and (is_there(Path(name) / CONFIG) or is_there(Path(name) / RECIPE))


def network_in(folder: Path, *, model: str | None = None, data: str | None = None) -> tuple[dict[str, Any], str]:
    """Options by which any command takes the network in ``folder``, and which network that is, in words.

    It is the fine-tuned one of a run if that has come to its end, else the pruned one, or that of a training. ``model``
    is the MODEL and ``data`` the DATA, if their files have moved or the folder does not tell them.
    """
    run, place, which = _newest(folder, model)
    options = {"data": data} if data is not None else {}
    options |= {name: run.there(name) for name in ("model", "data") if name in run.arguments and name not in options}
    if "model" in options:
        options["model"] = without_loading(options["model"])
    if "input" in run.arguments:
        options["input"] = run.arguments["input"]
    return {**options, "weights": str(place)}, which


def weights_in(folder: Path) -> tuple[str, str]:
    """The folder that has the weights of :func:`network_in`, and which network that is, in words."""
    _, place, which = _newest(folder, None)
    return str(place), which


def _newest(folder: Path, model: str | None) -> tuple[OpenedRun, Path, str]:

    config = read_config(folder / CONFIG) if is_there(folder / CONFIG) else {"settings": {}}
    if TRAINING in config["settings"] and at(config, "about", "run") is None and folder.name != FINETUNE:
        if not (folder / SUMMARY).is_file():
            raise RunError(
                f"the training in {folder} is not finished; go on with it: ifso train --resume --out {folder}"
            )
        given = {} if model is None else {"model": model}
        told = told_options(config, folder / CONFIG) or {}
        return OpenedRun(folder, {**told, **given}, told=frozenset(given)), folder, f"the trained network of {folder}"
    run = open_tuned(folder, model=model)
    if run.finetuning != "finished":
        return run, run.folder, f"the pruned network of {run.folder}"
    run.refuse_other_units()
    return run, run.finetune, f"the fine-tuned network of {run.folder}"


def found_again(folder: Path, arguments: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """The arguments that the run in ``folder`` tells, with paths that lead there from here, but for those ``given``."""
    run = OpenedRun(folder, arguments)
    names = [name for name in PATHS if name in arguments and name not in given]
    return {**arguments, **{name: run.there(name) for name in names}}


def open_run(folder: Path, *, model: str | None = None, unverified: bool = False) -> OpenedRun:
    """The finished run in ``folder``; ``model`` is the MODEL, if its file has moved or the run does not tell it.

    A folder with nothing but a network that ``ifso.save`` wrote is a run without arguments; a network for one of
    several budgets has those of the run that it lies in. One that failed its check, or whose files are of several
    runs, is refused unless ``unverified``.
    """
    given = {} if model is None else {"model": model}
    if folder.name == FINETUNE and (folder.parent / CONFIG).is_file():
        raise RunError(f"{folder} is the fine-tuning of a run; give the run itself, {folder.parent}")
    around = run_around(folder)
    if not is_there(folder / CONFIG) and is_there(folder / RECIPE) and around is not None:
        return replace(open_run(around, model=model, unverified=unverified), folder=folder)
    if not is_there(folder / CONFIG) and is_there(folder / RECIPE):
        return OpenedRun(folder, given, told=frozenset(given), unverified=unverified, by_python=True)
    if not is_there(folder / CONFIG):
        raise RunError(f"{folder} holds no run (no {CONFIG}); give a folder that ifso prune --out made")
    config = read_config(folder / CONFIG)
    arguments = told_options(config, folder / CONFIG)
    by_python = arguments is None
    arguments = told_names(config, folder / CONFIG) if arguments is None else arguments
    if TRAINING in config["settings"]:
        run = at(config, "about", "run")
        if isinstance(run, str):
            raise RunError(f"{folder} is the fine-tuning of a run; give the run itself, {run}")
        how = f"ifso prune and ifso eval take it as --weights {folder / 'model.safetensors'}"
        if "model" in arguments:
            how = f"ifso eval --model {folder} measures it, ifso prune {folder} prunes it"
        raise RunError(f"{folder} holds a training and no pruning; {how}")
    if not (folder / SUMMARY).is_file():
        how = "ifso.prune(…, resume=…)" if by_python else f"ifso prune --resume --out {folder}"
        raise RunError(f"the pruning in {folder} is not finished; go on with it: {how}")
    if not unverified:
        refuse_failed_run(folder)
        refuse_other_files(folder, config)
    return OpenedRun(
        folder, {**arguments, **given}, config["settings"].get("weights"), told=frozenset(given),
        unverified=unverified, by_python=by_python,
    )  # fmt: skip


def open_tuned(
    folder: Path, *, model: str | None = None, unverified: bool = False, finetuned: Path | None = None
) -> OpenedRun:
    """The run whose fine-tuning is in ``folder``, where ``ifso finetune --out`` put it; else the run in ``folder``.

    ``finetuned`` is where its fine-tuned network is, if that is said.
    """
    if finetuned is not None:
        refuse_no_network(finetuned)
    elif is_there(folder / CONFIG):
        config = read_config(folder / CONFIG)
        name = at(config, "about", "run") if TRAINING in config["settings"] else None
        if isinstance(name, str):
            folder, finetuned = pruning_of(folder, name), folder
    return replace(open_run(folder, model=model, unverified=unverified), tuned=finetuned)
