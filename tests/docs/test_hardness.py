"""What docs/robustness.md tells is what the long runs came to."""

import hardness


def test_the_page_has_the_figures_of_the_records():
    _, shown, _ = hardness.parts()
    assert shown == hardness.figures()


def test_nothing_failed():
    rows = [line.split(" | ") for line in hardness.figures().splitlines()[2:]]
    assert len(rows) == 6
    assert {row[2] for row in rows} == {"0"}
