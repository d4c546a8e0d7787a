"""What a page says of a run beside its charts: quality, uncertainty, warnings, budgets, files to take away."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
import torch.nn.functional as F
from report_runs import data_of, prune, write_many
from torch import nn

import ifso
from ifso.report.page import render
from ifso.report.results import binding, cards, quality, warnings
from ifso.report.sections import Comparison, facts, load_command
from ifso.runs.folder import RunFolder
from ifso.runs.reading import read_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results") / "run"
    prune(folder)
    return folder


def by_hand(folder: Path, settings: dict | None = None, evaluation: dict | None = None, **summary) -> Path:
    """A finished run of which only settings and summary are known."""
    with RunFolder.create(folder, {"settings": {"criterion": {"name": "ifso"}, **(settings or {})}}) as run:
        run.finish({"shares": {"macs": 0.5}, **summary})
    if evaluation is not None:
        (folder / "eval.json").write_text(json.dumps({"networks": evaluation}))
    return folder


def page_of(*folders: Path) -> str:
    return render([read_run(folder) for folder in folders])


def measured(**values) -> list[dict]:
    return [{"stage": "unpruned", **values}, {"stage": "pruned", **{name: each / 2 for name, each in values.items()}}]


class TestLayers:
    def test_macs_of_all_layers_are_those_of_the_network(self, finished):
        layers, summary = read_run(finished).structure.layers, json.loads((finished / "summary.json").read_text())
        assert [sum(layer.macs[place] for layer in layers) for place in (0, 1)] == [
            summary[when]["macs"] for when in ("before", "after")
        ]
        assert [sum(layer.params[place] for layer in layers) for place in (0, 1)] == [
            summary[when]["params"] for when in ("before", "after")
        ]

    def test_an_older_folder_has_no_macs_and_the_page_does_without(self, finished, tmp_path):
        for path in finished.iterdir():
            if path.is_file():
                (tmp_path / path.name).write_bytes(path.read_bytes())
        document = json.loads((finished / "structure.json").read_text())
        del document["macs"]
        (tmp_path / "structure.json").write_text(json.dumps(document))
        assert all(layer.macs is None for layer in read_run(tmp_path).structure.layers)
        old, new = page_of(tmp_path), page_of(finished)
        assert ("MACs before" in old, "MACs before" in new) == (False, True)
        assert "parameters before" in old

    def test_macs_of_attention_are_not_put_down_to_one_weight(self):
        from ifso.runs.structure import structure_of

        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        macs = structure_of(ifso.trace(layer, torch.zeros(1, 4, 16)))["macs"]
        assert macs == {"linear1.weight": 4 * 16 * 32, "linear2.weight": 4 * 32 * 16}


class TestQuality:
    def test_a_measure_of_the_user_goes_by_its_name_in_its_unit(self, tmp_path):
        run = read_run(by_hand(tmp_path / "run", measures=measured(f1_score=0.75, accuracy=80.0), shares={"macs": 0.5}))
        found = quality(run)
        assert (found.name, found.by_stage) == ("f1 score", {"unpruned": 0.75, "pruned": 0.375})
        assert "f1 score went from 0.75 to 0.375" in render([run])
        assert cards(run)[-1].label == "F1 score"

    def test_an_accuracy_below_one_is_not_called_percent(self, tmp_path):
        run = read_run(by_hand(tmp_path / "run", measures=measured(accuracy=0.5), shares={"macs": 0.5}))
        assert quality(run).shown("unpruned") == "0.5"

    def test_what_is_called_loss_alone_is_no_quality(self, tmp_path):
        run = read_run(by_hand(tmp_path / "run", measures=measured(loss=2.0)))
        assert quality(run).name is None
        assert cards(run)[-1].label == "Loss"

    def test_the_standard_error_needs_the_number_of_samples(self, tmp_path):
        networks = {"unpruned": {"top1": 80.0, "samples": 400}, "pruned": {"top1": 50.0}}
        found = quality(read_run(by_hand(tmp_path / "run", evaluation=networks)))
        assert found.error("unpruned") == pytest.approx(100 * (0.8 * 0.2 / 400) ** 0.5)
        assert found.error("pruned") is None
        assert found.shown("unpruned") == "80.00\u00a0±\u00a02.00\u00a0%"
        assert found.shown("pruned") == "50.00\u00a0%"

    def test_a_mean_precision_has_none(self, tmp_path):
        networks = {"pruned": {"map": 30.0, "samples": 400}}
        assert quality(read_run(by_hand(tmp_path / "run", evaluation=networks))).error("pruned") is None

    def test_the_path_has_every_stage_that_was_measured(self, tmp_path):
        stages = [
            {"stage": 1, "shares": {"macs": 0.9}, "values": {"accuracy": 88.0, "loss": 0.5}},
            {"stage": 2, "shares": {"macs": 0.8}, "values": {"loss": 0.6}},
            {"stage": 3, "shares": {"macs": 0.7}, "values": {"accuracy": 84.0, "loss": 0.9}},
        ]
        (run,) = data_of(page_of(by_hand(tmp_path / "run", measures=measured(accuracy=90.0), stages=stages)))["runs"]
        assert run["quality"]["path"] == [[1.0, 90.0], [0.9, 88.0], [0.7, 84.0]]
        assert run["losses"] == [[0.9, 0.5], [0.8, 0.6], [0.7, 0.9]]

    def test_latency_has_its_spread(self, tmp_path):
        timing = {"batch": 1, "seconds": 0.25, "spread": 0.02, "runs": 15}
        networks = {"unpruned": {"latency": [timing]}, "pruned": {"latency": [{**timing, "seconds": 0.125}]}}
        card = {each.label: each for each in cards(read_run(by_hand(tmp_path / "run", evaluation=networks)))}["Latency"]
        assert (card.before, card.after) == ("250\u00a0±\u00a010\u00a0ms", "125\u00a0±\u00a010\u00a0ms")
        assert card.note.endswith("middle half of 15 runs")


class TestBudgets:
    @pytest.mark.parametrize(("shares", "hardest"), [((0.5, 0.4), "macs"), ((0.3, 0.69), "params")])
    def test_of_several_the_binding_one_is_named(self, tmp_path, shares, hardest):
        settings, kept = {"budget": {"macs": 0.5, "params": 0.7}}, dict(zip(("macs", "params"), shares, strict=True))
        run = read_run(by_hand(tmp_path / "run", settings, shares=kept))
        assert binding(run) == hardest
        label = {"macs": "MACs", "params": "Parameters"}[hardest]
        assert [card.label for card in cards(run) if card.binding] == [label]
        assert "was binding" in render([run])

    def test_one_alone_is_not(self, tmp_path):
        run = read_run(by_hand(tmp_path / "run", {"budget": {"macs": 0.5}}, shares={"macs": 0.5}))
        assert binding(run) is None


class TestWarnings:
    def test_nothing_is_warned_of_where_nothing_is_wrong(self, finished):
        assert list(warnings(read_run(finished))) == []
        assert 'class="warnings"' not in page_of(finished)

    @pytest.mark.parametrize(
        ("settings", "summary", "words"),
        [
            ({}, {"floors": ["conv1", "conv2"]}, "2 groups are at the floor"),
            ({}, {"floors": [3, None, "a<b"]}, "1 group is at the floor"),
            ({}, {"checks": [{"name": "same output", "passed": False, "detail": "off by 3"}]}, "same output: off by 3"),
            ({"budget": {"latency": 0.5}}, {"latency": {"share": 0.6}}, "60.0\u00a0% of the time is left as measured"),
        ],
    )
    def test_what_is_wrong_is_on_the_page(self, tmp_path, settings, summary, words):
        run = read_run(by_hand(tmp_path / "run", settings, **summary))
        (found,) = warnings(run)
        assert words in found
        assert 'class="warnings"' in render([run])

    def test_a_layer_with_one_channel(self, tmp_path):
        group = {"name": "a", "size": 2, "members": [{"parameter": "a.weight", "role": "produces", "positions": 2}]}
        with RunFolder.create(tmp_path / "run", {"settings": {}}) as folder:
            folder.append({"removal": 1, "units": {"a": [1]}})
            folder.write_json("structure.json", {"groups": [group], "shapes": {"a.weight": [2, 3]}})
        assert list(warnings(read_run(tmp_path / "run"))) == ["1 layer has one channel left: a."]


class TestHidden:
    def test_the_flat_loss_of_a_one_shot_run(self, finished, tmp_path):
        prune(tmp_path / "run", schedule="one-shot")
        one_shot, other = (page_of(folder).partition("<script")[0] for folder in (tmp_path / "run", finished))
        assert ('data-chart="loss"' in one_shot, 'data-chart="loss"' in other) == (False, True)

    def test_reasons_that_surprise_nobody_are_folded(self, finished, tmp_path):
        assert "<summary>As expected: is an output of the model</summary>" in page_of(finished)
        document = json.loads((finished / "structure.json").read_text())
        document["frozen"].append({"parameter": "x.weight", "dim": 0, "reason": "no rule", "slices": 3})
        with RunFolder.create(tmp_path / "run", {"settings": {}}) as folder:
            folder.write_json("structure.json", document)
        before, _, folded = page_of(tmp_path / "run").partition("<summary>As expected")
        assert ("no rule" in before, "no rule" in folded) == (True, False)


class TestFiles:
    def test_the_recipe_is_on_the_page_byte_for_byte(self, finished):
        (run,) = data_of(page_of(finished))["runs"]
        assert zlib.decompress(base64.b64decode(run["recipe"])) == (finished / "recipe.json").read_bytes()

    def test_facts_about_time_data_and_file(self, finished):
        found = dict(facts(read_run(finished)))
        assert found["File with the weights"] == f"{(finished / 'model.safetensors').stat().st_size:,} bytes"
        assert found["Pruning took"].endswith(" s")

    @pytest.mark.parametrize("ignore", [(), ("layer1.*",)])
    def test_the_line_of_python_loads_the_network(self, tmp_path, ignore):
        batches = [(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0]))]
        result = ifso.prune(
            ifso.create_model("ifso:resnet8-digits"), batches,
            lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            budget=ifso.Budget(macs=0.8), example_inputs=batches[0][0], criterion="random", schedule="one-shot",
            recalibrate=0, about={"model": "ifso:resnet8-digits"}, out=tmp_path / "it's", ignore=ignore,
        )  # fmt: skip
        run = read_run(tmp_path / "it's")
        assert run.settings["ignore"] == (["layer1.0"] if ignore else [])
        modules = [name for name, module in result.model.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
        assert [layer.name for layer in run.structure.layers] == modules
        assert all(layer.macs is not None for layer in run.structure.layers)
        line = load_command(run)
        assert "num_classes=10" in line
        names: dict = {}
        exec(line, names)
        images, wanted = batches[0][0], result.model.eval()
        assert torch.equal(names["model"].eval()(images), wanted(images))

    def test_a_class_stands_for_what_only_python_knew(self, finished):
        assert load_command(read_run(finished)).endswith("Net(...))  # with the original, unpruned")

    def test_nothing_can_be_loaded_before_the_end(self, tmp_path):
        prune(tmp_path / "run", stop=2)
        assert load_command(read_run(tmp_path / "run")) is None
        assert "Load the pruned network" not in page_of(tmp_path / "run")


class TestSeveral:
    def test_means_and_spread_are_of_runs_alike(self, tmp_path):
        accuracies = {"a": 90.0, "b": 92.0, "c": 97.0}
        runs = [
            by_hand(tmp_path / name, {"seed": seed}, measures=measured(accuracy=2 * value))
            for seed, (name, value) in enumerate(accuracies.items())
        ]
        runs.append(by_hand(tmp_path / "other", {"criterion": {"name": "random"}}, measures=measured(accuracy=120.0)))
        (ours, chance) = data_of(page_of(*runs))["groups"]
        assert ours[:2] == ["ifso", [[0, 90.0], [1, 92.0], [2, 97.0]]]
        assert ours[2:] == pytest.approx([fmean(accuracies.values()), stdev(accuracies.values())])
        assert chance == ["random", [[3, 60.0]], 60.0, None]

    def test_budgets_are_apart(self, tmp_path):
        runs = [
            read_run(by_hand(tmp_path / str(share), {"budget": {"macs": share}}, measures=measured(accuracy=80.0)))
            for share in (0.5, 0.25)
        ]
        names = [name.replace("\u00a0", " ") for name in Comparison(runs, ["one", "two"]).groups]
        assert names == ["ifso, 50 % of the MACs", "ifso, 25 % of the MACs"]


def test_sections_without_anything_to_show_are_left_out(tmp_path):
    write_many(tmp_path / "run", 4)
    page = page_of(tmp_path / "run")
    for kind in ("tuning", "frozen", "checks", "accuracy"):
        assert f'id="{kind}-0"' not in page
        assert f'data-link="{kind}"' not in page
