"""``ifso repro``: what it refuses, lists, runs and shows. Printed and written results are compared as text."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from tiny_rows import AtOnce, few_images, status_of, tiny_row

from ifso.cli.main import _parser, main
from ifso.errors import IfsoError
from ifso_repro import commands as repro_runs
from ifso_repro import runner as running
from ifso_repro.config import rows, studies, study
from ifso_repro.jobs import Job
from ifso_repro.results import Result, write

ROW = "resnet32-cifar10-50"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made_up(**changes):
    values = {
        "row": ROW, "criterion": "ifso", "recipe": "paper", "seed": 0, "epochs": 200, "macs_kept": 0.499,
        "base_top1": 20.0, "last_top1": 12.5, "best_top1": 12.75, "history": [], "seconds": 60.0, "hardware": "abacus",
        "torch": "0.0", "params_kept": 0.6, "pruned_top1": 9.0, "prune_seconds": 18.0, "ifso": "0.0",
    }  # fmt: skip
    return Result(**{**values, **changes})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "nothing to run; name table1, table2"),
        ("table9", "no table, figure or row 'table9'; choose table1"),
        ("table2 --data cifar11:x", "--data cifar11:x: write one of cifar10:PATH, cifar100:PATH, imagenet:PATH"),
        ("table2 --data cifar10", "--data cifar10: write one of"),
        ("table2 --data cifar10:a --data cifar10:b", "--data gives cifar10 twice: a and b"),
        ("table2 --seeds 0", "--seeds: must be a whole number from 1 up, got '0'"),
        ("table2 --epochs 0", "--epochs: must be a whole number from 1 up, got '0'"),
        ("table2 --workers 0", "--workers: must be a whole number from 1 up, got '0'"),
        ("table2 --criteria taylor", "table2 has no criterion 'taylor'; it has true-loss, ifso"),
        ("table2 --recipes theirs", "table2 has no recipe 'theirs'; it has paper, brief"),
        ("table2 --prune steps=3", "--prune steps=3: write KEY=VALUE, with a key among schedule"),
        ("table2 --prune accumulate=few", "--prune accumulate=few: 'few' is no number"),
        ("figure8 --prune accumulate=3", "accumulate is what resnet32-cifar10-50.ifso+accumulate=1.brief.0 is about"),
        ("figure6 --prune batches-per-score=3", "batches_per_score is what"),
        ("table2 --precision half", "precision 'half' is unknown"),
        ("table2 --prune-precision fp16", "scores cannot be computed in fp16"),
        ("table2 --device gpu", "device 'gpu' cannot be used"),
        ("table2 --markdown x.md", "unrecognized arguments: --markdown x.md"),
        ("table2 --masks 3", "unrecognized arguments: --masks"),
        (
            "run table2 --seeds x",
            "a whole number from 1 up, got 'x'; ifso repro run --help shows",
        ),
        ("figure1 --workers 0", "--workers: must be a whole number from 1 up, got '0'"),
        ("figure1 --lanes 3", "unrecognized arguments: --lanes"),
        ("run figure1", "figure1 is a study of another kind; give its command: ifso repro figure1"),
        ("list recipe", "recipe is a study of another kind; give its command: ifso repro recipe"),
        ("figure1 table2", "run it apart from table2"),
        ("figure1 --data cifar10:a --data cifar10:b", "figure1 takes one --data; 2 were given"),
        ("table9 --table --out none", "no table, figure or row 'table9'"),
    ],
)
def test_bad_input_is_one_line(words, message, capsys):
    assert status_of(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("ifso: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("table2 --data cifar10:x --out figure1", "run table2 --data cifar10:x --out figure1"),
        ("--smoke --recipes paper ours", "run --smoke --recipes paper ours"),
        ("table2 --list --smoke", "list table2 --smoke"),
        ("--list --json", "list --json"),
        ("table2 table3 --table --markdown x.md --device cpu", "table table2 table3 --markdown x.md --device cpu"),
        ("--draw --runs a b", "draw --runs a b"),
        ("figure1 --draw --out x", "draw figure1 --out x"),
        ("--smoke figure1 --masks 3", "figure1 --smoke --masks 3"),
        ("--data cifar10:x recipe", "recipe --data cifar10:x"),
    ],
)
def test_older_spellings_mean_the_same(older, newer):
    one, other = (vars(_parser().parse_args(["repro", *words.split()])) for words in (older, newer))
    for flag in ("list", "table", "draw"):
        assert not other.pop(flag, False)
        one.pop(flag, None)
    assert {name: value for name, value in one.items() if name not in ("run", "studies")} == {
        name: value for name, value in other.items() if name not in ("run", "studies")
    }
    assert one["run"] is not None
    assert one["run"].__closure__[0].cell_contents == other["run"].__closure__[0].cell_contents
    assert [name for name in one["studies"] if name not in newer.split()[0]] == other["studies"]


def test_help_names_every_study_and_row(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        main(["repro", "--help"])
    words = set(re.findall(r"[\w-]+", capsys.readouterr().out))
    assert {*studies(), *rows(), "figure1", "recipe"} <= words

    def broken():
        raise IfsoError("repro/table9.toml is broken")

    monkeypatch.setattr("ifso_repro.config.studies", broken)
    with pytest.raises(SystemExit) as caught:
        main(["repro", "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1] == "repro/table9.toml is broken"


def test_what_is_lacking_is_told_once_for_all_runs(tmp_path, capsys):
    words = ["repro", ROW, "vgg16-cifar100-40", "--seeds", "1", "--out", str(tmp_path), "--data", "cifar10:none.npz"]
    assert main([*words, "--json"]) == 2
    out, err = capsys.readouterr()
    first, *told = err.splitlines()
    assert first == "· runs: 0 to do, 11 that cannot be done"
    assert told[0].startswith(f"ifso: error: {ROW}.true-loss.short.0 and 7 more: ")
    assert "begins with the weights resnet32_cifar10_authors.safetensors, which are not here; give their f" in told[0]
    lacking = "vgg16-cifar100-40 needs cifar100; give --data cifar100:PATH, or --smoke"
    assert told[1:] == [f"ifso: error: vgg16-cifar100-40.true-loss.short.0 and 2 more: {lacking}"]
    document = json.loads(out)
    assert (document["runs"], document["status"], len(document["failures"])) == ([], 2, 11)
    assert document["failures"][0]["run"] == f"{ROW}.true-loss.short.0"


def test_the_list_tells_how_far_each_run_is(tmp_path, capsys):
    write(made_up(), tmp_path / "results")
    (tmp_path / "work" / "training" / f"{ROW}.ifso.ours.0").mkdir(parents=True)
    done = tmp_path / "work" / "pruned" / f"{ROW}.random.0"
    done.mkdir(parents=True)
    (done / "summary.json").write_text('{"seconds": 1}')
    (tmp_path / "work" / "pruned" / f"{ROW}.group-fisher.0").mkdir(parents=True)
    chosen = ["--criteria", "ifso", "group-fisher", "random", "--recipes", "paper", "ours", "taught"]
    assert main(["repro", ROW, "--list", "--json", "--seeds", "1", *chosen, "--out", str(tmp_path)]) == 0
    listed = json.loads(capsys.readouterr().out)["runs"]
    assert {entry["run"] for entry in listed if "teacher" in entry} == {
        f"{ROW}.{criterion}.taught.0" for criterion in ("ifso", "group-fisher", "random")
    }
    assert {entry["teacher"] for entry in listed if "teacher" in entry} == {"resnet56-cifar10"}
    states = {entry["run"]: entry["state"] for entry in listed}
    assert states == {
        f"{ROW}.ifso.paper.0": "done",
        f"{ROW}.ifso.ours.0": "fine-tuning begun",
        f"{ROW}.ifso.taught.0": "to do",
        f"{ROW}.group-fisher.paper.0": "pruning begun",
        f"{ROW}.group-fisher.ours.0": "pruning begun",
        f"{ROW}.group-fisher.taught.0": "pruning begun",
        f"{ROW}.random.paper.0": "pruned",
        f"{ROW}.random.ours.0": "pruned",
        f"{ROW}.random.taught.0": "pruned",
    }
    assert main(["repro", ROW, "--list", "--smoke", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "8 runs" in text
    assert text.count("resnet56-cifar10") == 3
    assert "done" not in text
    assert main(["repro", ROW, "--list", "--smoke", "--epochs", "9", "--prune", "lr=1", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().err == "· a smoke run has sizes and images of its own: --epochs, --prune not used\n"


def test_the_list_of_all_studies_counts_what_is_done(tmp_path, capsys):
    write(made_up(), tmp_path / "results")
    assert main(["repro", "--list", "--json", "--seeds", "1", "--out", str(tmp_path)]) == 0
    found = {each["study"]: each for each in json.loads(capsys.readouterr().out)["studies"]}
    assert list(found) == list(studies())
    assert found["table2"] == {"study": "table2", "title": "ResNet-32 on CIFAR-10", "runs": 18, "done": 1}
    assert {each["done"] for name, each in found.items() if name.startswith("table") and name != "table2"} == {0}
    damaged = tmp_path / "results" / f"{ROW}.ifso.taught.0.json"
    damaged.write_text("{")
    assert main(["repro", "--list", "--json", "--seeds", "1", "--out", str(tmp_path)]) == 0
    counts = {each["study"]: each for each in json.loads(capsys.readouterr().out)["studies"]}["table2"]
    assert (counts["done"], counts["damaged"]) == (1, 1)
    assert main(["repro", "--list", "--out", str(tmp_path)]) == 0
    assert re.search(r"table2 .* 1 of 54, 1 damaged ", capsys.readouterr().out)
    damaged.unlink()
    assert main(["repro", "--list", "--out", str(tmp_path)]) == 0
    assert re.search(r"table2 .* 1 of 54 ", capsys.readouterr().out)
    for elsewhere in (["--validation", "50"], ["--smoke"]):
        assert main(["repro", "--list", "--json", *elsewhere, "--out", str(tmp_path)]) == 0
        others = {each["study"]: each for each in json.loads(capsys.readouterr().out)["studies"]}
        assert (others["table2"]["done"], others["table2"]["runs"]) == (0, 18 if "--smoke" in elsewhere else 54)
    assert main(["repro", "--list", "--recipes", "paper"]) == 2
    assert "name one: ifso repro list table2" in capsys.readouterr().err


def test_several_studies_share_their_runs(tmp_path, capsys):
    assert main(["repro", "table2", "figure7", ROW, "--list", "--json", "--out", str(tmp_path)]) == 0
    names = [entry["run"] for entry in json.loads(capsys.readouterr().out)["runs"]]
    assert len(names) == len(set(names)) == len({job.name for name in ("table2", "figure7") for job in study(name)})
    seeds = [int(name.rpartition(".")[2]) for name in names]
    assert seeds == sorted(seeds)


def test_tables_take_no_torch_and_other_studies_show_up_when_run(tmp_path):
    code = "import sys; from ifso.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    words = ["repro", "--table", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
    assert [number for number in range(1, 7) if f"Table {number}: " in done.stdout] == [1, 2, 3, 4, 5, 6]
    assert "Fig. 7" not in done.stdout
    assert done.stderr == f"· {tmp_path / 'results'} holds no results; say with --out where they are\n"


def test_a_result_is_shown_in_every_study_it_belongs_to(tmp_path, capsys):
    made = made_up(row="resnet32-cifar10-40", variant={"schedule": "one-shot"}, recipe="brief", epochs=30)
    write(made, tmp_path / "results")
    page = tmp_path / "tables.md"
    assert main(["repro", "--table", "--out", str(tmp_path), "--markdown", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "Fig. 7" in shown
    assert "Fig. 8" not in shown
    assert (
        "| ours | one-shot, recipe “brief” | 50.1 % | 20.00 | 12.50 | 7.50 | 12.75 | 1 seed | 18 |" in page.read_text()
    )
    assert main(["repro", "--table", "figure7", "--json", "--out", str(tmp_path)]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["title"] == "From one-shot to incremental (Fig. 7)"
    assert ["ours", "one-shot, recipe “brief”", "50.1 %"] in [line[:3] for line in table["sections"][0]]


def test_tables_say_what_was_pruned_otherwise(tmp_path, capsys):
    for seed in (0, 1):
        prune = {**Job(study(ROW)[0].row, "ifso", "paper").prune, "units_per_step": 4, "seed": 0}
        write(made_up(seed=seed, prune=prune), tmp_path / "results")
    assert main(["repro", "--table", ROW, "--json", "--out", str(tmp_path)]) == 0
    lines = json.loads(capsys.readouterr().out)["tables"][0]["sections"][0]
    assert "IFSO, recipe “paper”, units_per_step=4, one pruning" in [line[1] for line in lines]


def tiny_jobs(tmp_path, monkeypatch, **changes):
    row = tiny_row(tmp_path, **changes)
    monkeypatch.setattr(repro_runs, "_jobs", lambda _: [Job(row, "ifso", recipe) for recipe in ("paper", "ours")])


def test_from_data_to_the_table_of_results(tmp_path, capsys, monkeypatch):
    tiny_jobs(tmp_path, monkeypatch)
    AtOnce.made = []
    monkeypatch.setattr(running, "PrunePool", AtOnce)
    words = ["repro", "tiny", "--data", f"cifar10:{few_images(tmp_path)}", "--epochs", "1", "--out", str(tmp_path)]
    assert main([*words, "--units-per-step", "3", "--prune", "lr=0.02"]) == 0
    out, err = capsys.readouterr()
    assert "2 runs done" in out
    assert "tiny-cifar10-40.ifso.ours.0" in out
    assert "· training tiny-cifar10 for 1 epochs" in err
    assert AtOnce.made == ["tiny-cifar10-40.ifso.0"]
    result = json.loads((tmp_path / "results" / "tiny-cifar10-40.ifso.ours.0.json").read_text())
    assert (result["epochs"], result["prune"]["units_per_step"], result["prune"]["lr"]) == (1, 3, 0.02)
    assert main([*words, "--json"]) == 2
    out, err = capsys.readouterr()
    assert "units_per_step is 2 and was 3; lr is 0.01 and was 0.02; give another --out" in err
    document = json.loads(out)
    assert (document["runs"], len(document["failures"])) == ([], 2)


def test_a_damaged_result_is_told_once_and_the_others_are_shown(tmp_path, capsys, monkeypatch):
    tiny_jobs(tmp_path, monkeypatch)
    AtOnce.made = []
    monkeypatch.setattr(running, "PrunePool", AtOnce)
    place = tmp_path / "results" / "tiny-cifar10-40.ifso.paper.0.json"
    place.parent.mkdir()
    place.write_text('{"row": "tiny-ci')
    words = ["repro", "tiny", "--data", f"cifar10:{few_images(tmp_path)}", "--epochs", "1", "--out", str(tmp_path)]
    assert main(words) == 2
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if "error" in line]
    assert line.startswith(f"ifso: error: tiny-cifar10-40.ifso.paper.0: {place} is damaged (")
    assert "1 runs done, 1 failed" in out
    assert main([*words, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert [run["recipe"] for run in document["runs"]] == ["ours"]
    assert [failure["run"] for failure in document["failures"]] == ["tiny-cifar10-40.ifso.paper.0"]
    assert main([*words, "--list", "--json"]) == 0
    states = {entry["run"]: entry["state"] for entry in json.loads(capsys.readouterr().out)["runs"]}
    assert states == {"tiny-cifar10-40.ifso.paper.0": "damaged", "tiny-cifar10-40.ifso.ours.0": "done"}


@pytest.mark.slow
def test_a_smoke_row_in_about_a_minute(tmp_path, capsys):
    began = time.monotonic()
    assert main(["repro", ROW, "--smoke", "--json", "--out", str(tmp_path)]) == 0
    assert time.monotonic() - began < 120
    document = json.loads(capsys.readouterr().out)
    assert len(document["runs"]) == 16
    assert all(run["smoke"] and 0.4 < run["macs_kept"] <= 0.5 for run in document["runs"])
    assert len(list((tmp_path / "results" / "smoke").glob("*.json"))) == 16
    assert list((tmp_path / "results").glob("*.json")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_after_a_signal_the_same_command_goes_on(name, status, word, tmp_path):
    command = [sys.executable, "-m", "ifso.cli", "repro", ROW, "--smoke", "--criteria", "ifso", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    for line in process.stderr:
        if line.startswith("· pruning"):
            break
    time.sleep(6)
    process.send_signal(signal.Signals[name])
    rest = process.stderr.read()
    assert process.wait(60) == status
    assert rest.splitlines()[-1] == f"ifso: {word}; what is done is kept in {tmp_path}: the same command goes on"
    assert "Traceback" not in rest
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "training resnet32-cifar10" not in done.stderr
    assert "4 runs done" in done.stdout


def test_ranks_share_the_runs_and_the_first_tells_what_failed(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "ifso.cli",
        "repro",
        "vgg16-cifar10-50",
        "--seeds",
        "1",
        "--json",
        "--out",
        str(tmp_path),
    ]
    places = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(command, env={**os.environ, **places, "RANK": str(rank)}, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]  # fmt: skip
    (out, err), (silent, own) = (process.communicate(timeout=120) for process in processes)
    assert [process.returncode for process in processes] == [2, 0]
    assert silent == ""
    assert "ifso: error: vgg16-cifar10-50.true-loss.short.0 and 1 more: vgg16-cifar10-50 needs cifar10" in err
    assert {failure["run"] for failure in json.loads(out)["failures"]} == {
        job.name for job in study("vgg16-cifar10-50", seeds=1)
    }
    assert own == "· [1] runs: 0 to do, 1 that cannot be done\n"


def test_smoke_and_choices_have_folders_of_their_own(tmp_path, monkeypatch):
    seen = []

    def watched(args, shop, jobs, place):
        seen.append(shop)
        return {"runs": [], "failures": [], "status": 0}, None

    monkeypatch.setattr(repro_runs, "_run", watched)
    for more in ([], ["--smoke"], ["--validation", "5000"]):
        assert main(["repro", ROW, "--out", str(tmp_path), *more]) == 0
    real, smoke, choices = seen
    assert len({shop.work for shop in seen}) == 3
    assert choices.results == tmp_path / "results" / "validation-5000"
    assert (choices.validation, smoke.validation) == (5000, 0)
    assert replace(real, work=smoke.work, smoke=True) == smoke
