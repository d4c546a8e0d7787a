"""The modules of every room for docs/design.md, from the first lines of their docstrings.

python tests/docs/rooms.py    puts them into the page
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design.md"
BEGIN, END = "<!-- modules:begin -->\n", "<!-- modules:end -->"
ROOMS = (
    "common", "graph", "costs", "surgery", "curvature", "criteria", "tasks", "models", "data", "runs", "pruning",
    "training", "exporting", "report", "bench", "cli",
)  # fmt: skip
"""In the order of imports: each imports only from those before it."""


def summary(path):
    """The first sentence of a module's docstring."""
    words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.sub(r":\w+:`[~!]?", "`", words.partition("\n")[0].replace("``", "`"))


def table(folder):
    """A row for each module of a package, its own docstring above."""
    rows = [
        f"| `{path.relative_to(folder)}` | {summary(path)} |"
        for path in sorted(folder.rglob("*.py"))
        if not path.name.startswith("__")
    ]
    return "\n".join(
        [
            f"### `{folder.relative_to(ROOT / 'src')}/`: {summary(folder / '__init__.py')}",
            "",
            "| module | |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def tables():
    """Those of all rooms, and of the package beside ifso."""
    folders = [*(ROOT / "src" / "ifso" / room for room in ROOMS), ROOT / "src" / "ifso_repro"]
    return "\n".join(table(folder) for folder in folders)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + tables() + END + rest.partition(END)[2], encoding="utf-8")
