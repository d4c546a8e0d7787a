"""The site: built strictly, without a warning, and made of nothing that has to be fetched from elsewhere."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec, module_from_spec, spec_from_file_location

import pytest
from documents import DOCS, PAGES, ROOT

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOOKS = DOCS / "hooks"
NEEDED = ("mkdocs", "material", "mkdocstrings")
MISSING = [name for name in NEEDED if find_spec(name) is None]
needs_mkdocs = pytest.mark.skipif(
    bool(MISSING), reason=f"the site was not built: {', '.join(MISSING)} not installed (pip install '.[docs]')"
)
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
ELSEWHERE = re.compile(r"""url\(\s*['"]?(?:https?:)?//|@import\s+['"]?(?:https?:)?//""")


class Fetched(HTMLParser):
    """Addresses that a browser asks for by itself when it opens a page."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        address = dict(attrs).get(FETCHED.get(tag, ""), "")
        if re.match(r"(https?:)?//", address or "") and dict(attrs).get("rel") != "canonical":
            self.found.append(address)


def build(place):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    return place


@needs_mkdocs
def test_the_site_is_built_strictly_and_fetches_nothing(tmp_path):
    site = build(tmp_path)
    _look_at_pages(site)
    _look_at_docstrings((site / "api" / "index.html").read_text())


@pytest.mark.slow
@needs_mkdocs
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")
def test_search_works_from_a_disk(tmp_path):
    """A page that is opened with a question shows what was found, and the browser has nothing to complain about."""
    address = f"{(build(tmp_path / 'site') / 'guides' / 'export.html').as_uri()}?q=frozen"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", "--enable-logging=stderr"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [CHROMIUM, *options, profile, "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert re.search(r"\d+ matching documents", done.stdout)
    assert 'class="md-search-result__item"' in done.stdout
    assert "CONSOLE" not in done.stderr


def _look_at_pages(site):
    expected = [page.relative_to(DOCS).with_suffix(".html") for page in PAGES if page.is_relative_to(DOCS)]
    assert [str(page) for page in expected if not (site / page).is_file()] == []
    found = {page: Fetched(page.read_text()).found for page in site.rglob("*.html")}
    assert {str(page): addresses for page, addresses in found.items() if addresses} == {}
    assert [str(style) for style in site.rglob("*.css") if ELSEWHERE.search(style.read_text())] == []


def _look_at_docstrings(text):
    for name in ("prune", "trace", "score", "true_loss_change", "compact_"):
        assert f'id="ifso.{name}"' in text
    assert "proxy batches for one score" in text
    assert not re.search(r":(class|func|meth|mod|attr):", text)
    assert "&gt;&gt;&gt;" in text


def test_what_a_page_fetches_is_noticed():
    text = '<a href="https://x.y"><script src="https://a.b/c.js"></script><img src="//d.e/f.png"><img src="g.png">'
    assert Fetched(text).found == ["https://a.b/c.js", "//d.e/f.png"]


def hook(name):
    spec = spec_from_file_location(f"hook_{name}", HOOKS / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_out_of_the_documentation_are_plain_text(tmp_path):
    docs = tmp_path / "docs"
    (docs / "bench").mkdir(parents=True)
    (tmp_path / "setup.py").touch()
    (docs / "page.md").touch()
    within = hook("links").within
    text = "[a](../setup.py) [b](bench/) [c](page.md#x) [d](../missing.py) [e](https://f.g) ![h](bench/)"
    expected = "a b [c](page.md#x) [d](../missing.py) [e](https://f.g) ![h](bench/)"
    assert within(text, docs, docs.relative_to(docs) / "index.md") == expected


@pytest.mark.skipif(find_spec("griffe") is None, reason="griffe is not installed (pip install '.[docs]')")
def test_docstrings_become_markdown():
    as_markdown = hook("docstrings").as_markdown
    text = "See :class:`~ifso.Budget`.\n\n    >>> 1 + 1\n    2\n\nEnd."
    assert as_markdown(text) == "See `ifso.Budget`.\n\n    ```pycon\n    >>> 1 + 1\n    2\n    ```\n\nEnd."
