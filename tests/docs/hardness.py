"""The figures of docs/robustness.md, from the records of the long runs.

python tests/docs/hardness.py    puts them into the page
"""

import json
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "robustness.md"
BEGIN, END = "<!-- figures:begin -->\n", "<!-- figures:end -->"


def record(name):
    return json.loads((DOCS / "bench" / f"{name}.json").read_text())


def figures():
    """The table as Markdown."""
    networks, faults, fuzz, ranks = (record(name) for name in ("properties", "faults", "fuzz", "ranks"))
    killed = [case for case in ranks["cases"] if "seconds" in case]
    lines = [
        ("what", "how many", "failures", "record"),
        ("---", "---", "---:", "---"),
        (
            "random networks: traced, masked, compacted, recounted, saved, loaded",
            f"{networks['networks']:,} networks of {len(networks['parts'])} kinds of parts, {_share(networks)}",
            f"{len(networks['failures'])}",
            "properties",
        ),
        (
            "file operations that fail: disk full, refused, process killed, power lost",
            f"{faults['file_faults']:,} faults, at every operation of {_files(faults)} kinds of work",
            f"{_failed(faults, 'files')}",
            "faults",
        ),
        (
            "signals: SIGTERM and SIGINT at every file operation; these and SIGKILL at random times",
            f"{faults['signals_at_file_operations']:,}; {faults['signals_at_random_times']}, {_stopped(faults)}",
            f"{_failed(faults, 'signals')}",
            "faults",
        ),
        (
            "hostile files",
            f"{fuzz['inputs']:,} inputs to {len(fuzz['readers'])} readers, {fuzz['refused']:,} refused in a line",
            f"{fuzz['failed']}",
            "fuzz",
        ),
        (
            "ranks under `torchrun`, 2 and 4 on CPUs",
            f"{len(ranks['cases'])} cases; at most {ranks['worst_difference']:.1e} from one process",
            "0",
            "ranks",
        ),
        (
            "ranks that are killed, fail or get NaN",
            f"{len(killed)} cases; all others stopped after at most {ranks['slowest_stop']:.1f} s",
            "0",
            "ranks",
        ),
    ]
    links = [(*line[:3], line[3] if number < 2 else _link(line[3])) for number, line in enumerate(lines)]
    return "".join(f"| {' | '.join(line)} |\n" for line in links)


def _share(networks):
    return f"{networks['removed_units']:,} of {networks['units']:,} units removed"


def _stopped(faults):
    return f"{faults['stopped_by_signals']} of them before the end"


def _link(name):
    return f"[{name}.json](bench/{name}.json)"


def _files(faults):
    return sum(part["kind"] == "files" for part in faults["parts"].values())


def _failed(faults, kind):
    return sum(len(part["failures"]) for part in faults["parts"].values() if part["kind"] == kind)


def parts():
    """What stands before, in and after the table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    shown, _, after = rest.partition(END)
    return before, shown, after


if __name__ == "__main__":
    before, _, after = parts()
    PAGE.write_text(f"{before}{BEGIN}{figures()}{END}{after}")
