"""A fixed sample of hostile files against every reader; ``long_run.py`` makes a million. See ``contract.py``."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from binaries import Sentinel
from contract import SENTINEL, Hang, Reader, judged, run_one, time_limit
from mutating import generator, mutated_bytes, mutated_document, mutated_json
from readers import readers

from ifso.errors import IfsoError

SAMPLE = 4000
LEAST = 12
NAMES = (
    "recipe in memory", "recipe.json", "model.safetensors", "weights.safetensors", "weights.pth",
    "checkpoint of a pruning",
    "checkpoint of a training", "latency table", "config.json", "run opened", "summary of a training", "metrics.jsonl",
    "structure.json", "summary of a pruning", "report of a run", "page of a report", "COCO JSON", "COCO folder",
    "COCO folder,labels=ids,drop_degenerate,size=4", ".npz", "image", "options of coco:PATH", "name of a MODEL",
    "class folders", "TOML, Row", "TOML, Study", "result, resnet32", "result, retinanet",
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def known(root):
    return readers(root)


def test_every_reader_is_listed(known):
    assert tuple(known) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_a_valid_object_or_one_line(name, known, root):
    reader = known[name]
    total = sum(each.share for each in known.values())
    outcomes = {}
    for number in range(max(round(SAMPLE * reader.share / total), LEAST)):
        outcome, told = run_one(reader, root, 1, number)
        assert outcome != "failed", f"input {number} of {name}: {told}"
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert outcomes


@pytest.mark.parametrize(
    "change",
    [
        {"checks": [{"a": 1}]}, {"measures": [{}]}, {"shares": {}}, {"targets": {}}, {"seconds": "x"}, {"notes": [1]},
        {"latency": {}}, {"checks": [{"name": "size", "passed": False, "detail": "a\nb", "error": 0.0}]},
    ],
)  # fmt: skip
def test_summaries_that_tell_too_little(change, known, root):
    reader, path = known["summary of a pruning"], root / "finished" / "summary.json"
    whole = json.loads((root / "seed" / "summary.json").read_text())
    path.write_text(json.dumps(whole))
    assert judged(reader, path, root) == ("valid", "")
    path.write_text(json.dumps({**whole, **change}))
    assert judged(reader, path, root)[0] == "refused"


def _broken(read, root, **changes):
    reader = Reader("broken", lambda random: None, lambda _: read(), lambda found: None)
    return judged(replace(reader, **changes), None, root)


class TestTheContract:
    """Each part of it can be broken, and is then told."""

    def test_what_is_right(self, root):
        assert _broken(lambda: 1, root) == ("valid", "")

    def test_another_exception(self, root):
        assert _broken(lambda: {}["x"], root) == ("failed", "KeyError: 'x'")

    def test_a_system_exit(self, root):
        assert _broken(lambda: sys.exit(3), root)[0] == "failed"

    @pytest.mark.parametrize("message", ["two\nlines", "", "\x1b[1m", "no\0thing", "\ud800", "x" * 3000])
    def test_messages(self, message, root):
        def refuse():
            raise IfsoError(message)

        assert _broken(refuse, root)[0] == "failed"

    def test_a_message_without_the_file(self, root):
        def refuse():
            raise IfsoError("something is wrong")

        assert _broken(refuse, root)[0] == "refused"
        assert _broken(refuse, root, named="a.json")[0] == "failed"

    def test_a_hang(self):
        with pytest.raises(Hang), time_limit(0.05):
            time.sleep(5)

    def test_much_memory(self, root):
        assert _broken(lambda: len(b"x" * 2**30), root) == ("failed", "memory")

    def test_a_file_outside(self, root):
        (root.parent / "outside").write_text("x")
        assert "outside" in _broken((root.parent / "outside").read_text, root)[1]

    def test_a_link_that_leads_outside(self, root):
        link = root / "link"
        link.symlink_to(root.parent)
        assert "outside" in _broken(lambda: list(link.iterdir()), root)[1]

    def test_writing(self, root):
        assert "for writing" in _broken(lambda: (root / "new").write_text("x"), root)[1]

    def test_code(self, root):
        place = root / SENTINEL
        assert "code was run" in _broken(lambda: exec(*Sentinel(str(place)).__reduce__()[1]), root)[1]
        assert not place.exists()

    def test_a_wrong_object(self, root):
        def check(found):
            assert found == 2

        assert _broken(lambda: 1, root, check=check)[0] == "failed"


class TestMutating:
    def test_the_same_again(self):
        document = {"a": [1, {"b": "c"}], "d": None}
        made = [mutated_json(document, generator(3, "x", number)) for number in range(50)]
        assert made == [mutated_json(document, generator(3, "x", number)) for number in range(50)]
        assert len(set(made)) > 40
        assert made != [mutated_json(document, generator(4, "x", number)) for number in range(50)]

    def test_the_seed_is_left_alone(self):
        document = {"a": [1, {"b": "c"}], "d": None}
        for number in range(200):
            mutated_document(document, Random(number))
        assert document == {"a": [1, {"b": "c"}], "d": None}

    def test_bytes_of_any_length(self):
        for number in range(300):
            assert isinstance(mutated_bytes(b"ab"[: number % 3], Random(number)), bytes)


def test_nothing_is_left_behind(known, root):
    assert not (root / SENTINEL).exists()
    assert (root / "x").read_bytes() == b"outside"
    assert isinstance(root, Path)
