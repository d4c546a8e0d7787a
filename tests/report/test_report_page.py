"""From run folders to the page: what it says, what it refuses, and what it leaves out with a word about it."""

from __future__ import annotations

import base64
import json
import random
import re
import shlex
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_runs import EVIL, data_of, finetune, prune, write_many

from ifso.cli.main import main
from ifso.errors import RunError
from ifso.report import write_report
from ifso.report.page import render
from ifso.report.results import cards, quality
from ifso.report.sections import LINKS, prune_command
from ifso.runs.folder import RunFolder
from ifso.runs.reading import read_run
from ifso.runs.structure import from_document
from ifso.runs.values import percent
from ifso.surgery.store import read_recipe


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    prune(folder)
    finetune(folder, 3)
    return folder


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    prune(tmp_path / "begun", stop=2)
    return tmp_path / "begun"


def page_of(*folders: Path) -> str:
    return write_report(folders, folders[0].parent / "page.html").read_text(encoding="utf-8")


class Elements(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs
        self._open = [*self._open[-3:], tag]

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open[:-1]

    def handle_data(self, data: str) -> None:
        if self._open[-1:] not in (["script"], ["style"]):
            self.text += data


def test_a_staged_run_shows_what_each_stage_left(tmp_path):
    prune(tmp_path / "staged", schedule="staged")
    text = Elements(page_of(tmp_path / "staged")).text
    assert "What each stage left" in text
    stages = json.loads((tmp_path / "staged" / "summary.json").read_text())["stages"]
    assert len(stages) == 10
    assert all(percent(stage["shares"]["macs"]) in text for stage in stages)


class TestNumbers:
    def test_units_and_when_they_went_are_those_of_the_run(self, finished):
        (run,), lines = data_of(page_of(finished))["runs"], _lines(finished)
        assert run["removals"] == len(lines)
        kept = {group.name: set(group.kept) for group in read_recipe(finished).rounds[-1].groups}
        for group in run["groups"]:
            when = base64.b64decode(group["when"])
            assert (len(when), group["kept"]) == (group["size"], len(kept[group["name"]]))
            assert {unit for unit, moment in enumerate(when) if moment == 0} == kept[group["name"]]
            for unit, moment in enumerate(when):
                if moment:
                    (number,) = [n for n, line in enumerate(lines, 1) if unit in line["units"].get(group["name"], ())]
                    assert moment == 1 + round(249 * (number - 1) / (len(lines) - 1))

    def test_layers_have_the_channels_that_the_recipe_has(self, finished):
        (run,), shapes = data_of(page_of(finished))["runs"], read_recipe(finished).shapes
        found = {name: (channels, kept) for name, channels, kept, *_ in run["layers"]}
        wanted = {name: shapes[f"{name}.weight"] for name in ("first", "last", "middle", "fc")}
        assert found == {name: (shape.before[0], shape.after[0]) for name, shape in wanted.items()}
        coupled = {
            name for name, _, _, groups, *_ in run["layers"] if any(str(each) in run["coupled"] for each in groups)
        }
        assert coupled == {"first", "last"}

    def test_the_same_from_the_recipe_alone(self, finished, tmp_path):
        for name in ("config.json", "recipe.json", "model.safetensors", "summary.json", "metrics.jsonl"):
            (tmp_path / name).write_bytes((finished / name).read_bytes())
        old, new = data_of(page_of(tmp_path))["runs"][0], data_of(page_of(finished))["runs"][0]
        assert [group["when"] for group in old["groups"]] == [group["when"] for group in new["groups"]]
        assert sorted(each[:5] for each in old["layers"]) == sorted(each[:5] for each in new["layers"])

    def test_units_of_several_channels(self):
        weight = {"parameter": "heads.weight", "dim": 0, "role": "produces", "positions": 24}
        other = {"parameter": "heads.weight", "dim": 0, "role": "produces", "positions": 8}
        groups = [{"name": "a", "size": 4, "members": [weight]}, {"name": "b", "size": 8, "members": [other]}]
        document = {"groups": groups, "shapes": {"heads.weight": [40, 7]}}
        (layer,) = from_document(document, {"a": {0: 1, 2: None}, "b": {7: 3}}).layers
        assert (layer.name, layer.channels, layer.kept, layer.groups) == ("heads", 40, 40 - 2 * 6 - 1, (0, 1))

    def test_scores_are_those_of_the_first_step(self, finished):
        record = read_run(finished)
        (run,) = data_of(page_of(finished))["runs"]
        assert record.scores is not None
        assert record.scores.first
        low, high = run["scale"]["low"], run["scale"]["high"]
        for group in run["groups"]:
            levels = base64.b64decode(group["scores"])
            for level, score in zip(levels, record.scores.by_group[group["name"]], strict=True):
                assert 10 ** (low + (level - 1) / 249 * (high - low)) == pytest.approx(score, rel=0.05)
        first = _lines(finished)[0]
        ((name, (unit,)),) = first["units"].items()
        assert record.scores.by_group[name][unit] == pytest.approx(first["score"], rel=1e-5)

    def test_the_headline(self, finished):
        record, summary = read_run(finished), json.loads((finished / "summary.json").read_text())
        found = {card.label: card for card in cards(record)}
        assert found["MACs"].share == summary["shares"]["macs"]
        assert (found["MACs"].target, found["Latency"].after) == (0.5, None)
        measures = [one["accuracy"] for one in summary["measures"]]
        assert quality(record).by_stage == {"unpruned": measures[0], "pruned": measures[-1], "fine-tuned": 93.0}
        assert f"{measures[0]:.2f}\u00a0%" in page_of(finished)

    def test_what_ifso_eval_measured_comes_first(self, finished, tmp_path):
        timing = {"batch": 1, "seconds": 0.25, "spread": 0.0}
        networks = {
            "unpruned": {"top1": 70.0, "activation_bytes": 4000, "latency": [timing]},
            "pruned": {"top1": 60.0, "activation_bytes": 1000, "latency": [{**timing, "seconds": 0.125}]},
        }
        (finished / "eval.json").write_text(json.dumps({"networks": networks, "split": "test"}))
        try:
            found = {card.label: card for card in cards(read_run(finished))}
        finally:
            (finished / "eval.json").unlink()
        latency = found["Latency"]
        assert (latency.before, latency.after, latency.share) == ("250\u00a0ms", "125\u00a0ms", 0.5)
        assert (found["Activations"].before, found["Activations"].after) == ("4.00 kB", "1.00 kB")
        assert (found["Accuracy"].before, found["Accuracy"].after) == ("70.00\u00a0%", "93.00\u00a0%")
        assert found["Accuracy"].note.startswith("60.00\u00a0% when pruned")

    def test_the_command_that_repeats_a_run_parses_into_its_arguments(self, tmp_path):
        arguments = {
            "model": "ifso:resnet8-digits", "data": "digits", "macs": 0.5, "input": [1, 1, 8, 8],
            "ignore": ["fc", "a b"],
            "criterion_option": ["inverse=cg"], "channels_last": True, "seed": 3,
        }  # fmt: skip
        RunFolder.create(tmp_path / "run", {"settings": {}, "about": {"arguments": arguments}}).close()
        command = prune_command(read_run(tmp_path / "run"))
        assert command is not None
        from ifso.cli.main import _parser

        args = vars(_parser().parse_args(shlex.split(command)[1:]))
        assert {name: json.loads(json.dumps(args[name])) for name in arguments} == {**arguments, "macs": [0.5]}
        assert args["out"] == tmp_path / "run"


class TestPage:
    def test_every_section_is_there_and_nothing_is_loaded(self, finished):
        page = page_of(finished)
        found = Elements(page)
        ids = [value for name, value in found.attributes if name == "id"]
        assert len(ids) == len(set(ids))
        assert {f"{kind}-0" for kind in LINKS} <= set(ids)
        links = [value or "" for name, value in found.attributes if name in ("href", "src")]
        assert all(link.startswith("#") or link == "data:," for link in links)
        assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
        assert "url(" not in page
        assert "@import" not in page

    def test_the_script_is_the_one_that_the_policy_allows(self, finished):
        import hashlib

        page = page_of(finished)
        script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
        assert len(script) == 1
        digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}';" in page

    def test_names_with_markup_stay_text(self, finished, tmp_path):
        prune(tmp_path / EVIL.replace("/", "_"), name=EVIL)
        page = page_of(tmp_path / EVIL.replace("/", "_"))
        found, plain = Elements(page), Elements(page_of(finished))
        assert EVIL in found.text
        assert (found.tags["script"], found.tags["img"]) == (plain.tags["script"], 0)
        assert [layer[0] for layer in data_of(page)["runs"][0]["layers"]].count(EVIL) == 1

    def test_several_runs_are_compared(self, finished, tmp_path):
        prune(tmp_path / "other", criterion="magnitude")
        page = page_of(finished, tmp_path / "other")
        found = Elements(page)
        assert [run["criterion"] for run in data_of(page)["runs"]] == ["taylor", "magnitude"]
        assert found.tags["article"] == 2
        assert found.tags["option"] == 2
        assert 'data-chart="sidebyside"' in page
        differing = found.text.partition("Settings in which the runs differ")[2].partition("asked to keep")[0]
        assert re.search(r"criterion\.name\s*taylor\s*magnitude", differing)
        assert "accumulate" not in differing

    def test_accuracy_and_map_are_not_drawn_together(self, finished, tmp_path):
        with RunFolder.create(tmp_path / "boxes", {"settings": {"criterion": {"name": "ifso"}}}) as run:
            run.finish({"measures": [{"stage": "pruned", "map": 20.0}], "shares": {"macs": 0.5}})
        page = page_of(finished, tmp_path / "boxes")
        assert 'data-chart="dots"' not in page.partition("<body")[2].partition("<script")[0]
        assert "they are not drawn together" in Elements(page).text
        both = page_of(finished, finished).partition("<body")[2].partition("<script")[0]
        assert 'data-chart="dots"' in both

    def test_300_layers_take_little_room(self, tmp_path):
        write_many(tmp_path / "run", 300, units=128)
        page = page_of(tmp_path / "run")
        assert len(page) < 2_000_000
        assert len(data_of(page)["runs"][0]["curve"]["removal"]) <= 400
        assert len(data_of(page)["runs"][0]["layers"]) == 300

    def test_a_detector_is_judged_by_its_map(self, finished, tmp_path):
        settings = {"criterion": {"name": "ifso"}, "budget": {"macs": 0.5}}
        measures = [{"stage": "unpruned", "map": 40.0, "map50": 60.0}, {"stage": "pruned", "map": 20.0, "map50": 30.0}]
        with RunFolder.create(tmp_path / "run", {"settings": settings}) as run:
            run.finish({"measures": measures, "shares": {"macs": 0.5}})
        with RunFolder.create(tmp_path / "run" / "finetune", {"settings": {"training": {"epochs": 1}}}) as run:
            run.append({"epoch": 1, "loss": 1.0, "lr": 0.1, "seconds": 2.0, "map": 39.0, "eval_loss": 0.5})
            run.finish({"before": {"unpruned": 40.0, "pruned": 20.0}, "last_map": 39.0})
        found = quality(read_run(tmp_path / "run"))
        assert (found.name, found.by_stage) == ("mAP", {"unpruned": 40.0, "pruned": 20.0, "fine-tuned": 39.0})
        page = page_of(tmp_path / "run")
        assert "mAP went from 40.00\u00a0% to 39.00\u00a0% after fine-tuning" in Elements(page).text
        assert data_of(page)["runs"][0]["tuning"]["quality"] == [39.0]

    def test_a_measure_of_ones_own_is_shown_under_its_name_and_in_its_unit(self, tmp_path):
        settings = {"criterion": {"name": "ifso"}, "budget": {"macs": 0.5}}
        measures = [{"stage": "unpruned", "dice": 0.912, "accuracy": 9.0}, {"stage": "pruned", "dice": 0.873}]
        with RunFolder.create(tmp_path / "run", {"settings": settings}) as run:
            run.finish({"measures": measures, "shares": {"macs": 0.5}})
        page = page_of(tmp_path / "run")
        assert "dice went from 0.912 to 0.873" in Elements(page).text
        assert "Dice against MACs" in Elements(page).text
        points = data_of(page)["runs"][0]["quality"]
        assert (points["name"], points["percent"]) == ("dice", False)
        assert [point["value"] for point in points["points"]] == [0.912, 0.873]

    def test_a_network_that_was_only_saved(self, finished, tmp_path):
        for name in ("recipe.json", "model.safetensors"):
            (tmp_path / name).write_bytes((finished / name).read_bytes())
        page = page_of(tmp_path)
        assert "but not the run that made it" in Elements(page).text
        saved, whole = (data_of(each)["runs"][0] for each in (page, page_of(finished)))
        assert sorted(each[:5] for each in saved["layers"]) == sorted(each[:5] for each in whole["layers"])
        assert cards(read_run(tmp_path))[0].share == pytest.approx(cards(read_run(finished))[0].share)


@pytest.mark.parametrize("name", ["structure.json", "summary.json", "eval.json"])
def test_an_empty_object_is_told_to_be_damaged(finished, tmp_path, name):
    for path in finished.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_text("{}")
    assert f"{name} is damaged and was left out" in Elements(page_of(tmp_path)).text


class TestUnfinished:
    def test_a_half_finished_run_says_so(self, begun):
        page = page_of(begun)
        text = Elements(page).text
        assert "This run is not finished: 2 removals so far" in text
        assert data_of(page)["runs"][0]["removals"] == 2
        assert quality(read_run(begun)).by_stage.keys() == {"unpruned"}

    def test_before_the_first_removal(self, tmp_path):
        RunFolder.create(tmp_path / "run", {"settings": {"criterion": {"name": "ifso"}}}).close()
        page = page_of(tmp_path / "run")
        assert "This run is not finished: 0 removals so far" in Elements(page).text
        assert re.findall(r'<section id="(\w+)-0"', page) == ["summary", "setup"]
        assert re.findall(r'data-link="(\w+)"', page) == ["summary", "setup"]

    def test_a_resumed_run_says_so_and_ends_like_another(self, begun, finished):
        prune(begun, resume=begun)
        page = page_of(begun)
        text = Elements(page).text
        assert "resumed after removal 1" in text
        assert "finished, resumed once" in text
        assert "not finished" not in text
        whole, parts = (data_of(page_of(folder))["runs"][0] for folder in (finished, begun))
        assert [group["when"] for group in whole["groups"]] == [group["when"] for group in parts["groups"]]

    def test_a_half_finished_fine_tuning_says_so(self, begun):
        finetune(begun, 10, done=4)
        text = Elements(page_of(begun)).text
        assert "The fine-tuning is not finished: 4 of 10 epochs so far." in text

    def test_reading_changes_nothing(self, begun):
        before = {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()}
        page_of(begun)
        assert {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()} == before


class TestBadInput:
    def test_broken_lines_are_left_out_with_their_number(self, begun):
        with (begun / "metrics.jsonl").open("a") as file:
            file.write('{"removal": 3, "un\n[1, 2]\n{"removal": "x"}\n')
        page = page_of(begun)
        assert "metrics.jsonl: 3 lines are no whole JSON of a run and were left out" in Elements(page).text
        assert data_of(page)["runs"][0]["removals"] == 2

    @pytest.mark.parametrize(
        "name", ["summary.json", "structure.json", "recipe.json", "scores.safetensors", "first_scores.safetensors"]
    )
    def test_damaged_files_are_left_out_with_a_word(self, finished, tmp_path, name):
        folder = tmp_path / "run"
        folder.mkdir()
        for path in finished.iterdir():
            if path.is_file():
                data = path.read_bytes()
                (folder / path.name).write_bytes(data[: len(data) // 2] if path.name == name else data)
        text = Elements(page_of(folder)).text
        if name != "scores.safetensors":
            assert f"{name} is damaged and was left out" in text or f"{name} was left out" in text

    def test_numbers_that_are_none(self, tmp_path):
        settings = {"criterion": "ifso", "budget": {"macs": "half"}, "model": 3}
        with RunFolder.create(tmp_path / "run", {"settings": settings, "about": [], "versions": None}) as run:
            run.append({"removal": 1, "units": {"a": ["x", -1]}, "costs": 3, "shares": {"macs": "y"}, "loss": "z"})
            run.write_json("structure.json", {"groups": [{"name": "a"}, 5, {"size": 3}], "frozen": {}, "shapes": []})
            run.finish({"measures": {}, "checks": [7], "notes": [3], "before": [], "latency": "no"})
        finetune(tmp_path / "run", 1)
        (tmp_path / "run" / "eval.json").write_text('{"networks": {"unpruned": [], "pruned": {"latency": {}}}}')
        assert "run" in Elements(page_of(tmp_path / "run")).text

    def test_junk_in_any_place(self, finished, tmp_path):
        """Whatever stands where a number or text should be: there is a page, or one clear line."""
        pages, refusals = 0, []
        for seed in range(30):
            folder, chance = tmp_path / str(seed), random.Random(seed)
            shutil.copytree(finished, folder)
            for path in (*folder.rglob("*.json"), *folder.rglob("*.jsonl")):
                lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
                junk = [json.dumps(spoilt(json.loads(line), chance)) for line in lines]
                path.write_text("\n".join(junk))
            try:
                pages += "</html>" in render([read_run(folder)])
            except RunError as error:
                refusals.append(str(error))
        assert not any("\n" in refusal for refusal in refusals)
        assert pages > 15

    @pytest.mark.parametrize(
        ("files", "words"),
        [
            (None, "there is no such folder"),
            ({}, "holds no run"),
            ({"notes.txt": "x"}, "holds no run"),
            ({"config.json": "{"}, "damaged, or not of a run of ifso"),
            ({"config.json": '{"format": "ifso-run", "version": 0, "settings": {}}'}, "of another version of ifso"),
            (
                {"config.json": '{"format": "ifso-run", "version": 1, "settings": {"training": {}}}'},
                "a training and no",
            ),
            ({"config.json": '{"version": "1"}'}, "damaged, or not of a run of ifso"),
            ({"sub/config.json": "{}"}, "but sub within it may"),
        ],
    )
    def test_what_is_no_run_is_refused_in_one_line(self, tmp_path, capsys, files, words):
        folder = tmp_path / "folder"
        for name, content in (files or {}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
        if files == {}:
            folder.mkdir()
        assert main(["report", str(folder)]) == 2
        captured = capsys.readouterr()
        assert words in captured.err
        assert str(folder) in captured.err
        assert (captured.err.count("\n"), captured.out) == (1, "")

    def test_a_fine_tuning_leads_to_its_run(self, finished, tmp_path):
        assert read_run(finished / "finetune").folder == finished
        RunFolder.create(tmp_path / "tuned", {"settings": {"training": {}}, "about": {"run": "gone"}}).close()
        with pytest.raises(RunError, match="not there any more"):
            read_run(tmp_path / "tuned")


class TestCommand:
    def test_writes_into_the_run_and_says_where(self, finished, capsys):
        assert main(["report", str(finished)]) == 0
        assert capsys.readouterr().out == f"report: {finished / 'report.html'}\n"
        (finished / "report.html").unlink()

    def test_json(self, finished, tmp_path, capsys):
        place = tmp_path / "deep" / "page.html"
        assert main(["report", str(finished), "--out", str(place), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document == {"report": str(place), "bytes": place.stat().st_size, "runs": [str(finished)]}

    def test_no_file_of_a_run_is_overwritten(self, finished, capsys):
        before = (finished / "config.json").read_bytes()
        assert main(["report", str(finished), "--out", str(finished / "config.json")]) == 2
        assert "the report is a page; give a name that ends in .html" in capsys.readouterr().err
        assert (finished / "config.json").read_bytes() == before

    def test_several_runs_of_different_folders_need_a_place(self, finished, begun, capsys):
        assert main(["report", str(finished), str(begun)]) == 2
        assert "say with --out where" in capsys.readouterr().err

    def test_a_place_that_cannot_be_written(self, finished, tmp_path, capsys):
        (tmp_path / "file").write_text("")
        assert main(["report", str(finished), "--out", str(tmp_path / "file" / "page.html")]) == 2
        assert "cannot be written" in capsys.readouterr().err


def spoilt(value: Any, chance: random.Random) -> Any:
    """The same tree with nonsense in a few places."""
    if chance.random() < 0.02:
        return chance.choice([None, True, -1, 0, 1e300, 10**40, "x", "", [], {}, [1, "a"], {"a": 1}])
    if isinstance(value, dict):
        return {name: spoilt(each, chance) for name, each in value.items()}
    return [spoilt(each, chance) for each in value] if isinstance(value, list) else value


def _lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
