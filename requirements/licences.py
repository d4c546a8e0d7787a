"""Name, version, licence and size of every package that requirements/test.txt pins, from what is installed here.

python requirements/licences.py > licences.txt
"""

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

LONGEST_NAME = 60
PINS = Path(__file__).with_name("test.txt")


def licence(package: Distribution) -> str:
    """As its metadata say: an SPDX expression, classifiers, the name of a licence, or the file that it is in."""
    told = package.metadata
    classifiers = [
        line.rpartition(" :: ")[2] for line in told.get_all("Classifier", []) if line.startswith("License ::")
    ]
    text = (told.get("License") or "").strip()
    names = [text] if text and "\n" not in text and len(text) <= LONGEST_NAME else []
    files = [f"see its file {name}" for name in told.get_all("License-File", [])[:1]]
    return told.get("License-Expression") or ", ".join(classifiers or names or files) or "not stated"


def size(package: Distribution) -> int:
    """Bytes of its files."""
    return sum(file.size or 0 for file in package.files or ())


def listed() -> list[tuple[str, str, str, int]]:
    """(name, version, licence, bytes) of all pinned packages; "not installed" for those that are not here."""
    found = []
    for name in re.findall(r"^([\w.-]+)(?:\[[^]]*\])?==", PINS.read_text(), re.MULTILINE):
        try:
            package = distribution(name)
        except PackageNotFoundError:
            found.append((name, "", "not installed", 0))
        else:
            found.append((name, package.version, licence(package), size(package)))
    return found


if __name__ == "__main__":
    for name, version, terms, count in listed():
        print(f"{name:28} {version:16} {count / 1e6:8.1f} MB  {terms}")
