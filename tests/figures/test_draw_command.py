"""``ifso repro --draw``: what it writes, prints and refuses."""

import json
import sys

import pytest
from made_up import job_of, result, seeds
from tiny_rows import status_of

from ifso.cli.main import main
from ifso_repro.results import write


def fill(folder, *results):
    for each in results:
        write(each, folder / "results")


def one_line(capsys):
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("table2 --draw", "'table2' is no figure that can be drawn; choose from figure1, figure3, figure4, figure5"),
        ("figure2 --draw", "'figure2' is no figure that can be drawn"),
        ("figure5 --draw --seeds 3", "unrecognized arguments: --seeds 3"),
        ("figure5 --draw --table", "unrecognized arguments: --table"),
        ("figure5 --draw --recipes paper ours", "a picture shows one of them"),
        ("figure5 --draw --recipes theirs", "no recipe 'theirs'"),
        ("figure5 --draw --runs a", "name figure3 or figure4, and nothing else"),
        ("--draw --runs a", "name figure3 or figure4, and nothing else"),
        ("figure3 --draw --runs none", "none: there is no such folder; give one that ifso prune --out made"),
        ("figure3", "figure3 is a study of another kind; give its command: ifso repro draw figure3"),
        ("figure5 --runs a", "unrecognized arguments: --runs a"),
        ("figure5 --draw", "make them with: ifso repro figure5 --data cifar10:PATH --weights DIR"),
        ("figure7 --draw --smoke", "make them with: ifso repro figure7 --smoke --out OUT"),
        ("figure3 --draw", "has no pruned vgg16-cifar10-70; make it with: ifso repro vgg16-cifar10-70 --data cifar10"),
        ("figure4 --draw", "has no pruned resnet50-imagenet-50; make it with: ifso repro resnet50-imagenet-50"),
        ("figure1 --draw", "is not there; make it with: ifso repro figure1 --out OUT"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(more, message, tmp_path, capsys):
    assert status_of(f"{more} --out {tmp_path}") == 2
    assert message.replace("OUT", str(tmp_path)) in one_line(capsys)
    assert not list(tmp_path.iterdir())


def test_results_of_another_recipe_are_pointed_out(tmp_path, capsys):
    from dataclasses import replace

    job = job_of("figure5", row="resnet32-cifar10-50", criterion="ifso")
    fill(tmp_path, result(replace(job, recipe="ours"), 93.0))
    assert main(["repro", "figure5", "--draw", "--out", str(tmp_path)]) == 2
    assert "draw what there is with --recipes ours" in one_line(capsys)
    pytest.importorskip("matplotlib")
    assert main(["repro", "figure5", "--draw", "--recipes", "ours", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "figures" / "figure5-ours.svg").is_file()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "figure1.json is damaged"),
        ("[]", "is no result of ifso repro figure1"),
        ('{"study": "figure1"}', "no result"),
    ],
)
def test_a_damaged_figure1_is_one_line(text, message, tmp_path, capsys):
    (tmp_path / "figure1.json").write_text(text)
    assert main(["repro", "figure1", "--draw", "--out", str(tmp_path)]) == 2
    assert message in one_line(capsys)


def test_without_matplotlib_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    fill(tmp_path, *seeds(job_of("figure7", schedule="one-shot"), 93.0))
    assert main(["repro", "figure7", "--draw", "--out", str(tmp_path)]) == 2
    assert one_line(capsys) == 'ifso: error: figures need matplotlib: pip install "ifso[figures]"\n'


def test_a_place_that_cannot_be_written_is_one_line(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    fill(tmp_path, *seeds(job_of("figure7", schedule="one-shot"), 93.0))
    (tmp_path / "figures").write_text("a file")
    assert main(["repro", "figure7", "--draw", "--out", str(tmp_path)]) == 2
    assert "the picture cannot be written to" in one_line(capsys)


def test_all_figures_that_there_are(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    fill(tmp_path, *seeds(job_of("figure7", schedule="one-shot"), 93.0), result(job_of("figure8", accumulate=1), 92.0))
    assert main(["repro", "--draw", "--json", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)["figures"]
    assert [each["figure"] for each in figures] == ["figure7", "figure8"]
    assert figures[0]["not_run"] == ["ResNet-32, CIFAR-10: 4 of 5 points not run"]
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        "figure7.png", "figure7.svg", "figure8.png", "figure8.svg",
    ]  # fmt: skip
    assert [line.split(":")[0] for line in err.splitlines()] == [f"· figure{number}" for number in (1, 3, 4, 5, 6)]


def test_nothing_at_all(tmp_path, capsys):
    assert main(["repro", "--draw", "--out", str(tmp_path / "none")]) == 2
    assert "there is nothing to draw in" in capsys.readouterr().err.splitlines()[-1]
