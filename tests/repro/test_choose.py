"""``ifso bench choose``: rows, resuming, failures, the search for a pruning ratio, what is printed and drawn."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ifso
from ifso.cli.main import main
from ifso.errors import IfsoError
from ifso_repro.choose import rivals
from ifso_repro.choose import study as choose
from ifso_repro.choose.record import Record, read_record
from ifso_repro.choose.rivals import CLOSE, RIVALS, TRIES, Found, Rivals, search
from ifso_repro.choose.study import ChooseBench, ChooseSetup, options_of

NET = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10),
        )
"""
OURS = ["magnitude-one-shot", "taylor-one-shot"]
NOT_THERE = "Torch-Pruning is not installed: pip install torch-pruning==1.6.1"


class Halver:
    """Stands in for Torch-Pruning's pruner: takes the last channels of the first convolution away."""

    def __init__(self, model, example, *, pruning_ratio, **told):
        self.model, self.ratio, self.told = model, pruning_ratio, told

    def step(self):
        kept = 8 - math.floor(8 * self.ratio)
        first, norm, second = self.model[0], self.model[1], self.model[3]
        for module, name in ((first, "weight"), (first, "bias"), (norm, "weight"), (norm, "bias")):
            setattr(module, name, nn.Parameter(getattr(module, name).detach()[:kept].clone()))
        norm.running_mean, norm.running_var = norm.running_mean[:kept].clone(), norm.running_var[:kept].clone()
        second.weight = nn.Parameter(second.weight.detach()[:, :kept].clone())
        first.out_channels = norm.num_features = second.in_channels = kept


@pytest.fixture
def absent(monkeypatch):
    monkeypatch.setattr(rivals, "find_spec", lambda name: None)
    monkeypatch.setattr(Rivals, "version", staticmethod(lambda: None))


@pytest.fixture
def fake(monkeypatch):
    told = SimpleNamespace(pruners=[], broken=False)

    def pruner(*args, **kwargs):
        if told.broken:
            raise IndexError("index 9 is out of bounds\nfor it")
        told.pruners.append(Halver(*args, **kwargs))
        return told.pruners[-1]

    importance = SimpleNamespace(**{rival.importance: type(rival.name, (), {}) for rival in RIVALS.values()})
    library = SimpleNamespace(pruner=SimpleNamespace(BasePruner=pruner), importance=importance)
    monkeypatch.setitem(sys.modules, "torch_pruning", library)
    monkeypatch.setattr(rivals, "find_spec", lambda name: name)
    monkeypatch.setattr(Rivals, "version", staticmethod(lambda: "1.6.1"))
    return told


@pytest.fixture
def net(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    return f"{tmp_path / 'net.py'}:Net"


@pytest.fixture
def argv(net):
    sizes = ["--calibration", "48", "--measured", "100", "--batch", "16"]
    return ["bench", "choose", "--model", net, "--data", "digits", "--macs", "0.7", *sizes]


@pytest.fixture
def bench(net):
    return ChooseBench(ChooseSetup(net, "digits", calibration=48, measured=100, batch=16))


def only_row(bench, name, target):
    ((found, row),) = all_rows(bench, name, [target]).items()
    assert found == target
    return row


def all_rows(bench, name, targets, known=()):
    found = {}
    bench.rows(name, targets, found.__setitem__, known)
    return found


def rows(path):
    return {(row["method"], row["target"]): row for row in json.loads(path.read_text())["rows"]}


@pytest.mark.usefixtures("absent")
def test_rows_and_what_is_said_of_the_run(argv, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main([*argv, "--macs", "0.8", "0.5", "--methods", *OURS, "tp-taylor", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["settings"] == {
        "model": "net.py:Net", "data": "digits", "weights": None, "weights_sha256": None, "calibration": 48,
        "measured": 100, "batch": 16, "device": "cpu", "seed": 0,
    }  # fmt: skip
    versions = {"torch": torch.__version__, "ifso": ifso.__version__, "torch_pruning": None}
    assert found["about"] == {"device_name": "CPU", **versions}
    assert list(rows(out)) == [(name, target) for name in OURS for target in (0.8, 0.5)]
    for (_, target), row in rows(out).items():
        assert target - 0.15 < row["macs"] <= target
        assert 0 < row["params"] < 1
        assert 0 <= row["top1"] <= 100
        assert row["seconds"] > 0
    assert found["left_out"] == {"tp-taylor": NOT_THERE}
    shown = capsys.readouterr()
    assert f"tp-taylor is left out. {NOT_THERE}" in shown.err
    assert "tp-taylor is left out." in shown.out
    assert [line.split("│")[1].strip() for line in shown.out.splitlines() if "-one-shot" in line] == sorted(OURS * 2)


def test_a_row_is_one_call_of_prune_on_a_copy(bench):
    before = {name: tensor.clone() for name, tensor in bench.model.state_dict().items()}
    row = only_row(bench, "taylor-one-shot", 0.7)
    assert all(torch.equal(tensor, before[name]) for name, tensor in bench.model.state_dict().items())
    model = ifso.create_model(bench.setup.model)
    model.load_state_dict(before)
    result = ifso.prune(
        model.eval(), bench.calibration, bench.loss_fn, budget=ifso.Budget(macs=0.7), example_inputs=bench.example,
        criterion="taylor", schedule="one-shot", normalize="none", accumulate=1, batches_per_score=3, recalibrate=3,
    )  # fmt: skip
    assert row["macs"] == result.after.macs / result.before.macs
    assert row["params"] == result.after.params / result.before.params
    assert row["top1"] == choose.evaluate(result.model, bench.measured).top1


def test_a_staged_run_passes_through_all_targets(bench):
    found = all_rows(bench, "default", [0.6, 0.8])
    assert list(found) == [0.8, 0.6]
    for target, row in found.items():
        assert target - 0.15 < row["macs"] <= target
    assert found[0.8]["seconds"] < found[0.6]["seconds"]
    alone = only_row(bench, "default", 0.8)
    assert (alone["macs"], alone["top1"]) == (found[0.8]["macs"], found[0.8]["top1"])


def test_a_staged_run_goes_on_after_each_of_its_rows(argv, tmp_path, monkeypatch):
    """Rows stand in the file as they come, and those after an interruption are those of a run without one."""
    whole, parted = tmp_path / "whole.json", tmp_path / "parted.json"
    argv = [*argv, "--methods", "default", "--macs", "0.8", "0.7", "0.6", "--json"]
    assert main([*argv, str(whole)]) == 0
    add = Record.add

    def stopping(record, name, target, row):
        if target < 0.8:
            raise KeyboardInterrupt
        add(record, name, target, row)

    with monkeypatch.context() as patch:
        patch.setattr(Record, "add", stopping)
        assert main([*argv, str(parted)]) == 130
    assert [target for _, target in rows(parted)] == [0.8]
    assert main([*argv, str(parted)]) == 0
    for row, same in zip(rows(whole).values(), rows(parted).values(), strict=True):
        assert {**row, "seconds": 0} == {**same, "seconds": 0}


def test_a_method_says_only_what_is_set():
    assert options_of("default", 7) == {}
    assert options_of("group-fisher", 7) == {"criterion": "group-fisher"}
    assert options_of("default-no-update", 7) == {"update": False}
    told = options_of("ifso-one-shot", 7)
    assert (told.pop("criterion").coupled, told) == (
        "layers",
        {"schedule": "one-shot", "normalize": "sqrt-memory", "accumulate": 1, "batches_per_score": 7, "recalibrate": 7},
    )


def test_images_are_the_same_for_all_and_as_many_as_asked(bench):
    assert [len(labels) for _, labels in bench.calibration] == [16, 16, 16]
    assert sum(len(labels) for _, labels in bench.measured) == 100
    again = ChooseBench(bench.setup)
    assert all(torch.equal(x, u) for (x, _), (u, _) in zip(bench.calibration, again.calibration, strict=True))


@pytest.mark.usefixtures("absent")
def test_a_run_goes_on_where_it_was_stopped(argv, tmp_path, monkeypatch, capsys):
    out, asked = tmp_path / "out.json", []
    made = ChooseBench.rows

    def counted(bench, name, targets, *others):
        asked.append((name, *targets))
        if len(asked) == 2:
            raise KeyboardInterrupt
        made(bench, name, targets, *others)

    monkeypatch.setattr(ChooseBench, "rows", counted)
    argv = [*argv, "--methods", *OURS, "--json", str(out)]
    assert main(argv) == 130
    assert list(rows(out)) == [("magnitude-one-shot", 0.7)]
    first = rows(out)["magnitude-one-shot", 0.7]
    assert main(argv) == 0
    assert asked[1:] == [("taylor-one-shot", 0.7)] * 2
    assert rows(out)["magnitude-one-shot", 0.7] == first
    monkeypatch.setattr(choose, "ChooseBench", None)
    assert main(argv) == 0, "nothing is left to do"
    capsys.readouterr()
    assert main([*argv, "--seed", "1"]) == 2
    assert "was made with seed=0, not 1; give another file" in capsys.readouterr().err


@pytest.mark.usefixtures("absent")
def test_other_weights_under_the_same_name_are_noticed(argv, net, tmp_path, capsys):
    out, weights = tmp_path / "out.json", tmp_path / "w.safetensors"
    argv = [*argv, "--methods", "magnitude-one-shot", "--json", str(out), "--weights", str(weights)]
    for status in (0, 2):
        torch.manual_seed(100 + status)
        state = ifso.create_model(net).state_dict()
        save_file({name: value.half() if value.dim() > 1 else value for name, value in state.items()}, weights)
        assert main(argv) == status
    assert "was made with weights_sha256=" in capsys.readouterr().err


def test_a_method_that_fails_keeps_its_reason(argv, tmp_path, fake, capsys):
    out, fake.broken = tmp_path / "out.json", True
    argv = [*argv, "--methods", "tp-taylor", "taylor-one-shot", "--json", str(out)]
    assert main(argv) == 0
    found = rows(out)
    assert found["tp-taylor", 0.7] == {
        "method": "tp-taylor",
        "target": 0.7,
        "failed": "Torch-Pruning did not get to 70% of the MACs: IndexError: index 9 is out of bounds for it",
    }
    assert "top1" in found["taylor-one-shot", 0.7]
    assert "tp-taylor at 70% failed: Torch-Pruning did not get" in " ".join(capsys.readouterr().out.split())
    fake.broken = False
    assert main(argv) == 0
    assert "top1" in rows(out)["tp-taylor", 0.7]


class TestRivals:
    def test_the_ratio_that_meets_the_target(self, bench, fake):
        row = only_row(bench, "tp-magnitude", 0.7)
        shares = {kept: self.share(bench, kept) for kept in range(1, 9)}
        assert row["macs"] == max(share for share in shares.values() if share <= 0.7)
        assert all(pruner.told["global_pruning"] for pruner in fake.pruners)
        assert all(pruner.told["ignored_layers"] == [pruner.model[-1]] for pruner in fake.pruners)
        assert len(fake.pruners) <= TRIES

    def share(self, bench, kept):
        return (kept * 36 * 9 + 12 * kept * 16 * 9 + 120) / (8 * 36 * 9 + 12 * 8 * 16 * 9 + 120)

    def test_batch_norms_are_recalibrated(self, bench, fake):
        found = bench.rivals.prune(RIVALS["tp-magnitude"], 0.7)
        with torch.no_grad():
            outputs = [found.model[0](x) for x, _ in bench.calibration]
        mean = torch.stack([output.mean((0, 2, 3)) for output in outputs]).mean(0)
        torch.testing.assert_close(found.model[1].running_mean, mean)

    def test_taylor_finds_the_gradient_of_all_batches(self, bench):
        model = bench.model.eval()
        loss = sum(bench.loss_fn(model, batch) for batch in bench.calibration) / 3
        truth = torch.autograd.grad(loss, list(model.parameters()))
        for found, true in zip(bench.rivals.gradients(squared=False).values(), truth, strict=True):
            torch.testing.assert_close(found, true)

    def test_hessian_counts_every_image_and_says_so(self, bench, fake):
        model, images = bench.model.eval(), torch.cat([x for x, _ in bench.calibration])
        labels = torch.cat([y for _, y in bench.calibration])
        names = dict(model.named_parameters())

        def loss(parameters, x, y):
            return nn.functional.cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), y[None])

        detached = {name: value.detach() for name, value in names.items()}
        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(detached, images, labels)
        found = bench.rivals.gradients(squared=True)
        for name in names:
            torch.testing.assert_close(found[name], each[name].square().mean(0), rtol=1e-4, atol=1e-7)
        assert only_row(bench, "tp-hessian", 0.7)["form"].startswith("bug mended")

    def test_the_real_one(self, bench):
        pytest.importorskip("torch_pruning")
        for name in RIVALS:
            row = only_row(bench, name, 0.6)
            assert 0.4 < row["macs"] <= 0.6
            assert row["pruning_ratio"] > 0


class TestSearch:
    @pytest.mark.parametrize("target", [0.9, 0.5, 0.123])
    def test_a_smooth_curve_is_met_closely(self, target):
        found = search(lambda ratio: Found(nn.Identity(), ratio, 1 - ratio**3), target)
        assert target - CLOSE <= found.kept <= target

    def test_of_steps_the_largest_below(self):
        tried = []

        def attempt(ratio):
            tried.append(ratio)
            return Found(nn.Identity(), ratio, 1 - math.floor(10 * ratio) / 10)

        assert search(attempt, 0.75).kept == pytest.approx(0.7)
        assert len(tried) == TRIES

    def test_an_attempt_that_fails_was_too_much(self):
        def attempt(ratio):
            if ratio > 0.2:
                raise RuntimeError
            return Found(nn.Identity(), ratio, 1 - 3 * ratio)

        assert 0.6 - CLOSE <= search(attempt, 0.6).kept <= 0.6

    def test_out_of_reach(self):
        with pytest.raises(IfsoError, match="did not get to 50% of the MACs: it keeps more at every pruning ratio"):
            search(lambda ratio: Found(nn.Identity(), ratio, 0.8), 0.5)


def made_up(path, model="torchvision:resnet50", **more):
    some = {"params": 0.75, "seconds": 12.0}
    lines = [
        {"method": "default", "target": 0.7, "macs": 0.7, "top1": 70.0, **some},
        {"method": "default", "target": 0.5, "macs": 0.49, "top1": 60.125, **some},
        {"method": "tp-hessian", "target": 0.7, "macs": 0.695, "top1": 65.0, "form": "bug mended", **some},
        {"method": "tp-hessian", "target": 0.5, "failed": "IndexError: 3"},
    ]
    about = {"device_name": "CPU", "torch": "2.11", "ifso": "0.1.0", "torch_pruning": "1.6.1"}
    settings = {"model": model, "calibration": 1000, "measured": 400}
    document = {
        "bench": "choose", "settings": settings, "about": about, "unpruned": {"top1": 75.0}, "rows": lines,
        "left_out": {"tp-taylor": NOT_THERE}, **more,
    }  # fmt: skip
    path.write_text(json.dumps(document))
    return str(path)


def test_the_table(tmp_path, capsys):
    assert main(["bench", "choose", made_up(tmp_path / "a.json")]) == 0
    out = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert (
        """\
┏━━━━━━━━━━━━┳━━━━━━━┳━━━━━━━┳━━━━━━━━┳━━━━━━━━┳━━━━━━┓
┃ method     ┃ asked ┃  MACs ┃ params ┃  top-1 ┃    s ┃
┡━━━━━━━━━━━━╇━━━━━━━╇━━━━━━━╇━━━━━━━━╇━━━━━━━━╇━━━━━━┩
│ default    │   70% │ 70.0% │  75.0% │  70.00 │ 12.0 │
│ default    │   50% │ 49.0% │  75.0% │  60.12 │ 12.0 │
│ tp-hessian │   70% │ 69.5% │  75.0% │  65.00 │ 12.0 │
│ tp-hessian │   50% │     – │      – │ failed │    – │
└────────────┴───────┴───────┴────────┴────────┴──────┘"""
        in out
    )
    words = " ".join(out.split())
    assert "unpruned top-1 75.00 (standard error 2.2); 1000 images to calibrate, 400 to measure; CPU," in words
    assert "tp-hessian at 50% failed: IndexError: 3" in words


def test_markdown(tmp_path, capsys):
    assert main(["bench", "choose", made_up(tmp_path / "a.json"), "--markdown"]) == 0
    assert capsys.readouterr().out == (
        "| MACs removed | 30 % | 50 % |\n|---|---:|---:|\n"
        "| default | **70.0** | **60.1** |\n| tp-hessian | 65.0 | – |\n\n"
        "torchvision:resnet50, unpruned top-1 75.00 (standard error 2.2); 1000 images to calibrate, 400 to measure; "
        "CPU, torch 2.11, ifso 0.1.0, Torch-Pruning 1.6.1.\n"
        f"tp-hessian: bug mended\ntp-taylor is left out. {NOT_THERE}\ntp-hessian at 50% failed: IndexError: 3\n"
    )


def test_the_figure(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = [made_up(tmp_path / "a.json"), made_up(tmp_path / "b.json", "torchvision:mobilenet_v2")]
    assert main(["bench", "choose", "--draw", str(tmp_path / "c.svg"), *files]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "c.svg"), str(tmp_path / "c.png")]
    svg = (tmp_path / "c.svg").read_text()
    for words in ("resnet50", "mobilenet_v2", "MACs removed (%)", "Top-1 (%)", "tp-hessian", "unpruned"):
        assert f">{words}<" in svg


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--methods tp-tailor", "no method 'tp-tailor'; choose from default, "),
        ("--methods tp-tailor", "did you mean tp-taylor?"),
        ("--macs 80", "macs=80.0 is not a share"),
        ("--measured 9999", "--measured 9999: there are only 355 such images"),
        ("--calibration 9999", "--calibration 9999: there are only 1442 such images"),
        ("--device tpu9", "device 'tpu9' cannot be used"),
        ("--data nothing", "'nothing' is no data set"),
        ("--weights nothing.pth", "no weight file nothing.pth"),
        ("--draw a.svg", "--draw needs the JSON files of earlier runs"),
    ],
)
def test_bad_input_is_one_line_and_2(options, message, argv, capsys):
    assert main([*argv, *options.split()]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("· ")]
    assert len(errors) == 1
    assert message in errors[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory; give a file of ifso bench choose --json"),
        ("{", "not a record of ifso bench choose --json"),
        ("[1]", "not a record"),
        ('{"bench": "everyday"}', "not a record"),
        ({"rows": [{"method": "default"}]}, "not a record"),
        ({"rows": [{"method": "a", "target": 0.5, "macs": "x", "params": 1, "top1": 1, "seconds": 1}]}, "not a record"),
        ({"unpruned": {}}, "not a record"),
        ({"left_out": 3}, "not a record"),
    ],
)
def test_a_file_that_is_no_record(content, message, tmp_path, capsys):
    path = tmp_path / "a.json"
    if isinstance(content, dict):
        made_up(path, **content)
    elif content is not None:
        path.write_text(content)
    assert main(["bench", "choose", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_meant_together(tmp_path, capsys):
    path = made_up(tmp_path / "a.json")
    for argv, message in (
        ([path, "--model", "ifso:resnet20"], "JSON files are shown, --model runs"),
        ([], "give --model and --data, or JSON files"),
        (["--draw", "x.svg", made_up(tmp_path / "b.json", rows=[])], "has no row to draw"),
    ):
        assert main(["bench", "choose", *argv]) == 2
        assert message in capsys.readouterr().err
    assert read_record(tmp_path / "a.json").has("default", 0.7)
    assert not read_record(tmp_path / "a.json").has("tp-hessian", 0.5)


@pytest.mark.parametrize("option", ["--batch 0", "--calibration 0", "--threads 0", "--threads few"])
def test_counts_are_whole_numbers(option, argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*argv, *option.split()])
    assert caught.value.code == 2
    assert f"argument {option.split()[0]}: must be a whole number from 1 up" in capsys.readouterr().err
