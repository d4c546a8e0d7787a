"""The page in a real browser: nothing is complained about or asked for, charts are drawn, pointer and keys work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from browser import MISSING, Browser, program
from report_runs import EVIL, finetune, prune, write_many

import ifso
from ifso.report import write_report
from ifso.report.sections import LINKS

pytestmark = pytest.mark.skipif(program() is None, reason=MISSING)

CHARTS = ("quality", "layers", "scores", "order", "costs", "loss", "epochs", "training")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run, two compared, and one of 300 layers."""
    folder = tmp_path_factory.mktemp("pages")
    prune(folder / "one", name=EVIL)
    finetune(folder / "one", 4)
    prune(folder / "two", criterion="magnitude", name=EVIL)
    write_many(folder / "many", 300)
    one, two, many = (folder / name for name in ("one", "two", "many"))
    return {"one": write_report([one]), "two": write_report([one, two]), "many": write_report([many])}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def middle(browser: Browser, selector: str, share: float = 0.5) -> tuple[float, float]:
    """A place within an element, brought into sight."""
    browser.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
    browser.settle()
    box = browser.run(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")
    return box["left"] + share * box["width"], box["top"] + 0.3 * box["height"]


def tip(browser: Browser) -> str:
    return browser.run("document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText")


@pytest.mark.parametrize("page", ["one", "two", "many"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_nothing_is_complained_about_or_asked_for(browser, pages, page, width, dark):
    browser.open(pages[page], width=width, dark=dark, touch=width < 500)
    assert browser.complaints == []
    assert browser.requests == [pages[page].resolve().as_uri()]
    assert browser.run("self.hacked === undefined")
    assert browser.run("document.documentElement.scrollWidth") <= width
    sections = browser.run("[...document.querySelectorAll('section')].filter(s => s.offsetHeight > 40).map(s => s.id)")
    missing = {"accuracy", "tuning", "frozen", "checks"} if page == "many" else set()
    assert {f"{kind}-0" for kind in LINKS.keys() - missing} <= set(sections)
    colour = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (colour == "rgb(255, 255, 255)") is not dark


def test_every_chart_is_drawn(browser, pages):
    browser.open(pages["one"])
    for chart in CHARTS:
        shapes = f"document.querySelectorAll('[data-chart={chart}] svg :is(rect, path, circle)').length"
        assert browser.run(shapes) > 0, chart
    bars = browser.run("document.querySelectorAll('[data-chart=layers] .pan rect.f-whole').length")
    assert bars == 4


def test_hovering_tells_names_and_numbers(browser, pages):
    browser.open(pages["one"])
    browser.point(*middle(browser, "[data-chart=layers] .pan svg", 0.05))
    assert tip(browser).startswith("first\n")
    assert "of 6 channels kept" in tip(browser)
    assert "coupled with last" in tip(browser)
    assert browser.run("document.querySelectorAll('[data-chart=layers] .hl').length") == 2
    browser.point(*middle(browser, "[data-chart=scores] .pan svg", 0.05))
    assert "units kept" in tip(browser)
    browser.point(*middle(browser, "[data-chart=costs] svg.hot"))
    assert "MACs: " in tip(browser)
    browser.point(*middle(browser, "[data-chart=quality] svg.hot"))
    assert "of the MACs" in tip(browser)
    browser.point(2, 2)
    assert tip(browser) == ""


def test_a_click_shows_the_units_of_a_group(browser, pages):
    browser.open(pages["one"])
    place = middle(browser, "[data-chart=layers] .pan svg", 0.05)
    browser.point(*place)
    browser.click(*place)
    assert browser.run("document.querySelectorAll('[data-detail] svg rect').length") == 6
    assert "Group first" in browser.run("document.querySelector('[data-detail]').innerText")


def test_keys_do_what_the_pointer_does(browser, pages):
    browser.open(pages["one"])
    browser.run("document.querySelector('[data-chart=layers] .pan svg').focus()")
    browser.key("Home")
    assert tip(browser).startswith("first\n")
    browser.key("End")
    assert tip(browser).startswith("fc\n")
    browser.key("ArrowLeft")
    browser.key("Enter")
    assert "units kept" in browser.run("document.querySelector('[data-detail]').innerText")


def test_a_touch_does_so_too(browser, pages):
    browser.open(pages["one"], width=390, height=844, touch=True)
    browser.tap(*middle(browser, "[data-chart=layers] .pan svg", 0.05))
    assert tip(browser).startswith("first\n")
    assert "Group first" in browser.run("document.querySelector('[data-detail]').innerText")


def test_another_run_can_be_chosen(browser, pages):
    browser.open(pages["two"])
    shown = "[...document.querySelectorAll('article.run')].map(article => article.offsetHeight > 0)"
    assert browser.run(shown) == [True, False]
    browser.run("(c => { c.value = '1'; c.dispatchEvent(new Event('change')); })(document.getElementById('chooser'))")
    assert browser.run(shown) == [False, True]
    assert browser.run("document.querySelectorAll('#run-1 [data-chart=layers] rect.f-whole').length") > 0
    assert browser.complaints == []


def test_colours_can_be_switched(browser, pages):
    browser.open(pages["one"])
    seen = []
    for _ in range(3):
        browser.run("document.getElementById('theme').click()")
        seen.append(browser.run("getComputedStyle(document.body).backgroundColor"))
    assert seen == ["rgb(255, 255, 255)", "rgb(17, 21, 26)", "rgb(255, 255, 255)"]


@pytest.mark.slow
def test_a_run_of_resnet50_is_below_2_mb(browser, tmp_path):
    resnet = ifso.create_model("torchvision:resnet50")
    batches = [(torch.randn(2, 3, 64, 64), torch.tensor([1, 2]))]
    ifso.prune(
        resnet, batches, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), budget=ifso.Budget(macs=0.5),
        example_inputs=batches[0][0], criterion="random", schedule="one-shot", recalibrate=0, out=tmp_path / "run",
    )  # fmt: skip
    page = write_report([tmp_path / "run"])
    assert page.stat().st_size < 2_000_000
    browser.open(page, width=390)
    assert browser.complaints == []
    assert browser.run("document.querySelectorAll('[data-chart=layers] .pan rect.f-whole').length") == 54


def test_paper_is_light_and_narrow(browser, pages):
    browser.open(pages["many"], dark=True)
    browser.run(
        "addEventListener('beforeprint', () => { const plot = document.querySelector('[data-chart=layers] .plot');"
        " self.seen = [plot.scrollWidth, plot.parentElement.clientWidth]; })"
    )
    assert browser.print().startswith(b"%PDF")
    drawn, room = browser.run("self.seen")
    assert drawn <= room <= 720
    assert browser.complaints == []


def test_300_layers_can_be_told_apart(browser, pages):
    browser.open(pages["many"])
    assert browser.run("document.querySelectorAll('[data-chart=layers] .pan rect.f-whole').length") == 300
    step = browser.run("document.querySelector('[data-chart=layers] .pan svg').clientWidth") / 300
    assert step >= 3.5
    x, y = middle(browser, "[data-chart=layers] .pan svg", 150.5 / 300)
    browser.point(x, y)
    assert tip(browser).startswith("stages.12.blocks.6.conv\n")
    overlapping = """(() => {
      const texts = [...document.querySelectorAll('[data-chart=layers] .pan text:not(.on)')];
      const places = texts.map(text => Number(text.getAttribute('x')));
      return places.some((place, each) => each && place - places[each - 1] < 11);
    })()"""
    assert browser.run(overlapping) is False


SAVED = """(() => {
  self.saved = [];
  URL.createObjectURL = blob => { self.saved.push(blob); return '#'; };
  HTMLAnchorElement.prototype.click = function () { self.savedAs = this.download; };
})()"""


def test_tables_and_the_recipe_can_be_saved(browser, pages):
    browser.open(pages["two"])
    browser.run(SAVED)
    browser.run("document.querySelector('#run-0 [data-csv=\"layers.csv\"]').click()")
    header, *lines = browser.run("self.saved[0].text()").splitlines()
    assert header.startswith("layer,share kept,channels kept,of,parameters before,parameters after,MACs before")
    assert browser.run("self.savedAs") == "layers.csv"
    assert [line.split(",")[0] for line in lines if line.startswith(("first", "fc"))] == ["first", "fc"]
    assert any(line.startswith('"' + EVIL.replace('"', '""')) for line in lines)
    browser.run("document.querySelector('#run-0 [data-recipe]').click()")
    browser.run("new Promise(done => { const look = () => self.saved[1] ? done() : setTimeout(look, 10); look(); })")
    recipe = pages["two"].parent / "one" / "recipe.json"
    assert browser.run("self.saved[1].text()") == recipe.read_text(encoding="utf-8")
    assert browser.complaints == []


def test_a_name_that_looks_like_a_formula_is_saved_as_text(browser, tmp_path):
    prune(tmp_path / "run", name="=1+1")
    browser.open(write_report([tmp_path / "run"]))
    browser.run(SAVED)
    browser.run("document.querySelector('[data-csv=\"layers.csv\"]').click()")
    assert "\r\n'=1+1," in browser.run("self.saved[0].text()")


def test_commands_can_be_copied(browser, pages):
    browser.open(pages["one"])
    assert browser.run("document.querySelectorAll('[data-copy]:not([hidden])').length") >= 1
    browser.run("navigator.clipboard.writeText = async text => { self.copied = text; }")
    browser.run("document.querySelector('[data-copy]').click()")
    browser.settle()
    assert browser.run("self.copied").startswith("import ifso")
    assert browser.run("document.querySelector('[data-copy]').textContent") == "Copied"


def test_layers_are_shown_by_share_channels_parameters_and_macs(browser, pages):
    browser.open(pages["one"], width=390)
    buttons = "[...document.querySelectorAll('[data-chart=layers] .choices button')]"
    assert browser.run(f"{buttons}.map(button => button.textContent)") == [
        "Share kept",
        "Channels",
        "Parameters",
        "MACs",
    ]
    assert browser.run("document.documentElement.scrollWidth") <= 390
    browser.run(f"{buttons}[3].click()")
    assert browser.run(f"{buttons}[3].getAttribute('aria-pressed')") == "true"
    assert "MACs" in browser.run("document.querySelector('[data-chart=layers] .axis').textContent")
    assert browser.complaints == []


def test_every_axis_has_a_title(browser, pages):
    browser.open(pages["one"])
    titles = """Object.fromEntries([...document.querySelectorAll('[data-chart]')].map(place =>
      [place.dataset.chart, place.querySelector('text[transform^="rotate(-90"]').textContent]))"""
    assert browser.run(titles) == {
        "quality": "Accuracy", "layers": "Share kept", "order": "MACs left at that time", "scores": "Score",
        "costs": "Share kept", "loss": "Loss", "epochs": "Accuracy", "training": "Loss",
    }  # fmt: skip


def test_several_runs_are_dots_with_mean_and_spread(browser, pages, tmp_path):
    for seed in (1, 2, 3):
        prune(tmp_path / str(seed), criterion="random", seed=seed)
    page = write_report([tmp_path / "1", tmp_path / "2", tmp_path / "3"])
    browser.open(page)
    assert browser.run("document.querySelectorAll('[data-chart=dots] svg.hot circle.seen').length") == 3
    assert browser.run("document.querySelectorAll('[data-chart=dots] svg.hot :is(.mean, .bars)').length") == 2
    browser.point(*middle(browser, "[data-chart=dots] svg.hot", 0.6))
    assert "mean of 3 runs" in tip(browser)
