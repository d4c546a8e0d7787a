"""docs/design.md lists every module with what its docstring says, and no room is forgotten."""

from rooms import BEGIN, END, PAGE, ROOMS, ROOT, tables


def test_the_modules_of_the_page_are_those_of_the_source():
    assert PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0] == tables()


def test_every_package_is_a_room():
    packages = {path.parent.name for path in (ROOT / "src" / "ifso").glob("*/__init__.py")}
    assert packages == set(ROOMS)
