"""Which channels go together, written out by hand: catches too much coupling as well as too little."""

from __future__ import annotations

import pytest
import torch
from cases import CASES

import ifso

Places = dict[tuple[str, int], list]
"""(parameter, dim) → for each unit of a group the positions it owns there."""


def each(start: int, stop: int, step: int = 1) -> list[int]:
    """One position for each unit: ``start``, ``start + step``, …"""
    return list(range(start, stop, step))


def runs(units: int, length: int, start: int = 0) -> list[tuple[int, ...]]:
    """``length`` neighbouring positions for each unit."""
    return [tuple(range(start + length * unit, start + length * (unit + 1))) for unit in range(units)]


def made(layer: str, where: list) -> Places:
    """The output channels of a ``ConvBN``."""
    followers = ("bn.weight", "bn.bias", "bn.running_mean", "bn.running_var")
    return {(f"{layer}.conv.weight", 0): where} | {(f"{layer}.{name}", 0): where for name in followers}


def rows(layer: str, where: list) -> Places:
    """The output channels of a layer with a bias (or a norm's weight and bias)."""
    return {(f"{layer}.weight", 0): where, (f"{layer}.bias", 0): where}


def read(layer: str, where: list) -> Places:
    """The input channels of a layer."""
    return {(f"{layer}.weight", 1): where}


def expected(*groups: Places) -> set[frozenset]:
    """Groups as sets of units, units as sets of (parameter, dim, positions)."""
    found = set()
    for places in groups:
        sizes = {len(where) for where in places.values()}
        assert len(sizes) == 1, "every place of a group must name all its units"
        found.add(frozenset(_unit(places, unit) for unit in range(sizes.pop())))
    return found


def _unit(places: Places, unit: int) -> frozenset:
    position = {key: where[unit] for key, where in places.items()}
    return frozenset((*key, p if isinstance(p, tuple) else (p,)) for key, p in position.items())


def found(graph: ifso.ChannelGraph) -> set[frozenset]:
    """The same form, from the graph."""
    return {
        frozenset(frozenset((m.parameter, m.dim, m.index[unit]) for m in group.members) for unit in range(group.size))
        for group in graph.groups
    }


def balances(graph: ifso.ChannelGraph) -> set[frozenset]:
    """Every balance as a set of blocks, a block as the sorted (group, unit) it holds."""
    name = {group.first + unit: (group.name, unit) for group in graph.groups for unit in range(group.size)}
    return {
        frozenset(tuple(sorted(name[unit] for unit in block)) for block in one.blocks.tolist())
        for one in graph.balances
    }


def blocks(group: str, count: int, size: int) -> frozenset:
    """``count`` blocks of ``size`` neighbouring units of a group."""
    return frozenset(tuple((group, unit) for unit in run) for run in runs(count, size))


def flags(graph: ifso.ChannelGraph) -> dict[str, set[str]]:
    """Flags by group, for groups that have any."""
    return {group.name: set(group.flags) for group in graph.groups if group.flags}


def frozen(graph: ifso.ChannelGraph) -> dict[tuple[str, int], str]:
    """Reasons by (parameter, dim)."""
    return {(item.parameter, item.dim): item.reason for item in graph.frozen}


def check_ends(graph: ifso.ChannelGraph, first: str, last: str) -> None:
    """What reads the input and what makes the output are frozen, whole, and say so; nothing else is."""
    reasons = frozen(graph)
    assert set(reasons) == {(f"{first}.weight", 1), (f"{last}.weight", 0), (f"{last}.bias", 0)}
    assert "input" in reasons[f"{first}.weight", 1]
    assert "output" in reasons[f"{last}.weight", 0]
    assert all(len(item.index) > 1 for item in graph.frozen)


def test_plain():
    graph = CASES["plain"].graph()
    assert found(graph) == expected(
        made("stem", each(0, 8)) | read("body.conv", each(0, 8)),
        made("body", each(0, 6)) | read("head.fc", each(0, 6)),
    )
    check_ends(graph, "stem.conv", "head.fc")
    assert balances(graph) == set()
    assert flags(graph) == {}


def test_roles_say_who_makes_and_who_reads_the_channels():
    group = CASES["plain"].graph().groups[0]
    roles = {(member.parameter, member.dim): member.role for member in group.members}
    assert roles["stem.conv.weight", 0] == "produces"
    assert roles["body.conv.weight", 1] == "consumes"
    assert roles["stem.bn.weight", 0] == roles["stem.bn.running_var", 0] == "follows"


@pytest.mark.parametrize(
    ("name", "weight", "roles"),
    [
        ("grouped", "body.conv.weight", {0: "produces", 1: "consumes"}),
        ("transposed-grouped", "up.weight", {0: "consumes", 1: "produces"}),
    ],
)
def test_roles_in_grouped_convolutions(name, weight, roles):
    members = [member for group in CASES[name].graph().groups for member in group.members]
    assert {member.dim: member.role for member in members if member.parameter == weight} == roles


def test_residual():
    graph = CASES["residual"].graph()
    assert found(graph) == expected(
        made("stem", each(0, 8)) | made("block1.conv2", each(0, 8)) | read("block1.conv1.conv", each(0, 8))
        | read("block2.conv1.conv", each(0, 8)) | read("block2.shortcut.conv", each(0, 8)),
        made("block1.conv1", each(0, 6)) | read("block1.conv2.conv", each(0, 6)),
        made("block2.conv1", each(0, 6)) | read("block2.conv2.conv", each(0, 6)),
        made("block2.conv2", each(0, 12)) | made("block2.shortcut", each(0, 12)) | read("head.fc", each(0, 12)),
    )  # fmt: skip
    check_ends(graph, "stem.conv", "head.fc")
    assert balances(graph) == set()
    assert flags(graph) == {}


def test_preactivation():
    norm = ("weight", "bias", "running_mean", "running_var")
    trunk = {(f"{bn}.{name}", 0): each(0, 8) for bn in ("bn1", "last") for name in norm}
    inner = {(f"bn2.{name}", 0): each(0, 6) for name in norm}
    ends = {("stem.weight", 0): each(0, 8), ("conv2.weight", 0): each(0, 8)}
    assert found(CASES["preactivation"].graph()) == expected(
        trunk | ends | read("conv1", each(0, 8)) | read("head.fc", each(0, 8)),
        inner | {("conv1.weight", 0): each(0, 6)} | read("conv2", each(0, 6)),
    )


def test_concat():
    graph = CASES["concat"].graph()

    def norm(where: list) -> Places:
        return {(f"norm.{name}", 0): where for name in ("weight", "bias", "running_mean", "running_var")}

    assert found(graph) == expected(
        made("stem", each(0, 6)) | read("layer1.conv", each(0, 6)) | read("layer2.conv", each(0, 6))
        | norm(each(0, 6)) | read("transition", each(0, 6)),
        made("layer1", each(0, 4)) | read("layer2.conv", each(6, 10)) | norm(each(6, 10))
        | read("transition", each(6, 10)),
        made("layer2", each(0, 4)) | norm(each(10, 14)) | read("transition", each(10, 14)),
        {("transition.weight", 0): each(0, 8)} | read("head.fc", each(0, 8)),
    )  # fmt: skip
    check_ends(graph, "stem.conv", "head.fc")
    assert balances(graph) == set()


def test_concat_with_the_input_freezes_only_the_inputs_part():
    graph = CASES["concat-with-input"].graph()
    assert found(graph) == expected(
        made("stem", each(0, 8)) | read("body.conv", each(3, 11)),
        made("body", each(0, 6)) | read("head.fc", each(0, 6)),
    )
    (part,) = (item for item in graph.frozen if item.parameter == "body.conv.weight")
    assert (part.dim, part.index) == (1, (0, 1, 2))
    assert "input" in part.reason


def test_depthwise():
    graph = CASES["depthwise"].graph()
    assert found(graph) == expected(
        made("stem", each(0, 8)) | made("dw", each(0, 8)) | made("wide", runs(8, 2)) | read("pw.conv", runs(8, 2)),
        made("pw", each(0, 6)) | read("head.fc", each(0, 6)),
    )
    check_ends(graph, "stem.conv", "head.fc")
    assert balances(graph) == set()


def test_grouped_convolution_is_balanced_not_tied():
    """8 → 12 channels in 4 groups: as many units as channels, each block to keep equally many."""
    graph = CASES["grouped"].graph()
    assert found(graph) == expected(
        made("stem", each(0, 8)) | read("gconv.conv", [0, 1, 0, 1, 0, 1, 0, 1]),
        made("gconv", each(0, 12)) | read("body.conv", each(0, 12)),
        made("body", each(0, 6)) | read("head.fc", each(0, 6)),
    )
    check_ends(graph, "stem.conv", "head.fc")
    assert balances(graph) == {blocks("stem.conv", 4, 2), blocks("gconv.conv", 4, 3)}


def test_grouped_chain_has_nested_and_overlapping_balances():
    graph = CASES["grouped-chain"].graph()
    assert {group.name: group.size for group in graph.groups} == {
        "stem.conv": 8,
        "g4.conv": 12,
        "g2.conv": 12,
        "g3.conv": 12,
    }
    assert balances(graph) >= {blocks("stem.conv", 4, 2), blocks("g4.conv", 4, 3)}
    assert balances(graph) >= {blocks("g2.conv", 2, 6), blocks("g2.conv", 3, 4), blocks("g3.conv", 3, 4)}


def test_grouped_convolution_of_the_input_is_balanced_too():
    graph = CASES["grouped-input"].graph()
    assert found(graph) == expected(
        made("gconv", each(0, 8)) | read("body.conv", each(0, 8)),
        made("body", each(0, 6)) | read("head.fc", each(0, 6)),
    )
    assert balances(graph) == {blocks("gconv.conv", 2, 4)}


@pytest.mark.parametrize("name", ["shuffle", "channel-shuffle"])
def test_shuffle(name):
    """Channel 4·b + j of block b stands at 3·j + b after the shuffle; 12 units, not 4."""
    graph = CASES[name].graph()
    assert found(graph) == expected(
        made("stem", each(0, 12)) | read("gconv.conv", [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]),
        made("gconv", each(0, 12)) | read("body.conv", [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]),
        made("body", each(0, 6)) | read("head.fc", each(0, 6)),
    )
    check_ends(graph, "stem.conv", "head.fc")
    assert balances(graph) == {blocks("stem.conv", 3, 4), blocks("gconv.conv", 3, 4)}


def test_shuffle_before_a_depthwise_convolution():
    """The depthwise weights are dealt out along with the channels, so the blocks stay free of each other."""
    graph = CASES["shuffle-depthwise"].graph()
    shuffled = [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    assert found(graph) == expected(
        made("stem", each(0, 12)) | read("gconv.conv", [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]),
        made("gconv", each(0, 12)) | made("dw", shuffled) | read("body.conv", shuffled),
        made("body", each(0, 6)) | read("head.fc", each(0, 6)),
    )
    assert balances(graph) == {blocks("stem.conv", 3, 4), blocks("gconv.conv", 3, 4)}


def test_shuffle_between_grouped_convolutions():
    """ShuffleNet V1, 18 channels in 3 groups: a group of the second reads two of each block of the first."""
    graph = CASES["shufflenet-v1"].graph()
    shuffled = [3 * j + b for b in range(3) for j in range(6)]
    stream = made("stem", each(0, 18)) | made("g2", each(0, 18)) | read("head.fc", each(0, 18))
    assert found(graph) == expected(
        stream | read("g1.conv", [0, 1, 2, 3, 4, 5] * 3),
        made("g1", each(0, 18)) | made("dw", shuffled) | read("g2.conv", [place % 6 for place in shuffled]),
    )
    assert balances(graph) == {blocks("stem.conv", 3, 6), blocks("g1.conv", 3, 6), blocks("g1.conv", 9, 2)}


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("grouped", {"stem.conv": "10 01 10 01", "gconv.conv": "110 011 101 110"}),
        ("grouped", {"gconv.conv": "100 010 001 010"}),
        ("shuffle", {"stem.conv": "1000 0100 0001", "gconv.conv": "1100 0011 1001"}),
        ("shuffle", {"gconv.conv": "1000 0100 0001"}),
        ("shuffle-depthwise", {"gconv.conv": "1100 0011 1001"}),
        ("shufflenet-v1", {"g1.conv": "101010 010101 011001"}),
        ("channel-shuffle", {"gconv.conv": "1110 0111 1011"}),
        ("channel-shuffle", {"gconv.conv": "1000 0100 0001"}),
    ],
)
def test_blocks_may_keep_different_positions(name, choice):
    graph = CASES[name].graph()
    keep = {group: torch.tensor([bit == "1" for bit in bits if bit != " "]) for group, bits in choice.items()}
    balanced = ifso.balance(graph, keep)
    assert all(balanced[group].equal(wanted) for group, wanted in keep.items())
    model = CASES[name].model()
    with torch.no_grad(), ifso.masked(model, graph, keep):
        soft = model(CASES[name].inputs())
    ifso.compact_(model, graph, keep)
    torch.testing.assert_close(model(CASES[name].inputs()), soft, rtol=1e-10, atol=1e-12)


def test_shuffle_of_a_grouped_convolution_that_reads_the_image():
    """One channel of the image for each group: the shuffled channels stay, what comes after them may go."""
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 12, 1, groups=3),
        torch.nn.ChannelShuffle(3),
        torch.nn.Conv2d(12, 6, 1),
        torch.nn.Conv2d(6, 2, 1),
    )
    graph = ifso.trace(net, torch.zeros(1, 3, 4, 4))
    assert [(group.name, group.size) for group in graph.groups][-1] == ("2", 6)


def test_chunk_and_shuffle():
    """ShuffleNet V2: the passing half and the branch's output are dealt out in turn."""
    graph = CASES["shufflenet-v2"].graph()
    assert found(graph) == expected(
        made("stem", each(0, 4)) | read("body.conv", each(0, 8, 2)),
        made("stem", each(4, 8)) | read("unit.pw1.conv", each(0, 4)),
        made("unit.pw1", each(0, 4)) | made("unit.dw", each(0, 4)) | read("unit.pw2.conv", each(0, 4)),
        made("unit.pw2", each(0, 4)) | read("body.conv", each(1, 8, 2)),
        made("body", each(0, 6)) | read("head.fc", each(0, 6)),
    )
    passing, worked, branch = (
        {(name, unit) for unit in range(4)} for name in ("stem.conv", "stem.conv#2", "unit.pw2.conv")
    )
    wanted = {frozenset(tuple(sorted(block)) for block in pair) for pair in ((passing, worked), (passing, branch))}
    assert balances(graph) == wanted


def test_pixel_shuffle():
    graph = CASES["pixel-shuffle"].graph()
    assert found(graph) == expected(
        made("stem", each(0, 8)) | read("up", each(0, 8)),
        rows("up", runs(3, 4)) | read("last", each(0, 3)),
    )
    check_ends(graph, "stem.conv", "last")
    assert balances(graph) == set()


def test_pixel_unshuffle():
    graph = CASES["pixel-unshuffle"].graph()
    assert found(graph) == expected(made("stem", each(0, 4)) | read("last", runs(4, 4)))
    check_ends(graph, "stem.conv", "last")


def test_flatten():
    graph = CASES["flatten"].graph()
    assert found(graph) == expected(
        made("stem", each(0, 4)) | read("fc1", runs(4, 4)),
        rows("fc1", each(0, 6)) | read("fc2", each(0, 6)),
    )
    check_ends(graph, "stem.conv", "fc2")


def test_im2col():
    graph = CASES["im2col"].graph()
    assert found(graph) == expected(
        made("stem", each(0, 4)) | read("mix", runs(4, 9)), rows("mix", each(0, 6)) | read("last", each(0, 6))
    )


@pytest.mark.parametrize("name", ["squeeze-excite", "squeeze-excite-linear"])
def test_squeeze_excite(name):
    graph = CASES[name].graph()
    assert found(graph) == expected(
        made("stem", each(0, 8))
        | read("se.squeeze", each(0, 8))
        | rows("se.excite", each(0, 8))
        | read("body.conv", each(0, 8)),
        rows("se.squeeze", each(0, 4)) | read("se.excite", each(0, 4)),
        made("body", each(0, 6)) | read("head.fc", each(0, 6)),
    )
    check_ends(graph, "stem.conv", "head.fc")
    assert balances(graph) == set()
    assert flags(graph) == {}


def test_cbam_is_flagged_for_its_statistics_over_channels():
    graph = CASES["cbam"].graph()
    assert found(graph) == expected(
        made("stem", each(0, 8))
        | read("cbam.mlp.0", each(0, 8))
        | rows("cbam.mlp.2", each(0, 8))
        | read("body.conv", each(0, 8)),
        rows("cbam.mlp.0", each(0, 4)) | read("cbam.mlp.2", each(0, 4)),
        made("body", each(0, 6)) | read("head.fc", each(0, 6)),
    )
    assert flags(graph) == {"stem.conv": {"reduced over channels"}}


def test_convolution_along_channels_freezes_them():
    graph = CASES["eca"].graph()
    assert found(graph) == expected(made("body", each(0, 6)) | read("head.fc", each(0, 6)))
    reasons = frozen(graph)
    assert ("stem.conv.weight", 0) in reasons
    assert ("body.conv.weight", 1) in reasons
    assert "input" not in reasons["stem.conv.weight", 0]


@pytest.mark.parametrize("name", ["along-channels", "real-along-channels"])
def test_convolution_along_channels_freezes_only_them(name):
    graph = CASES[name].graph()
    prefix = "net." if name.startswith("real") else ""
    assert found(graph) == expected(rows(f"{prefix}along", each(0, 4)) | read(f"{prefix}fc", each(0, 4)))
    assert (f"{prefix}stem.conv.weight", 0) in frozen(graph)


@pytest.mark.parametrize("name", ["attention", "padded", "res2net"])
def test_numbers_in_python_follow_on_real_tensors_too(name):
    plain, real = CASES[name].graph(), CASES[f"real-{name}"].graph()
    assert real.on_real_tensors
    assert found(real) == {
        frozenset(frozenset((f"net.{parameter}", *rest) for parameter, *rest in unit) for unit in group)
        for group in found(plain)
    }


def test_positions_chosen_by_value_after_a_split():
    graph = CASES["chosen-positions"].graph()
    assert graph.on_real_tensors
    assert found(graph) == expected(
        made("stem", each(0, 4)) | read("score", each(0, 4)) | read("deep", each(0, 4)),
        made("stem", each(4, 8)) | read("branch.conv", each(0, 4)),
        made("branch", each(0, 6)) | read("score", each(4, 10)) | read("deep", each(4, 10)),
        rows("deep", each(0, 6)) | read("head", each(0, 6)),
    )


def test_fpn_with_shared_heads():
    graph = CASES["fpn"].graph()
    laterals, outputs = ("l1", "l2", "l3"), ("o1", "o2", "o3")
    pyramid: Places = {}
    features: Places = {}
    for lateral, output in zip(laterals, outputs, strict=True):
        pyramid |= rows(lateral, each(0, 8)) | read(output, each(0, 8))
        features |= rows(output, each(0, 8))
    tower = rows("tower", each(0, 8)) | rows("norm", each(0, 8)) | read("cls", each(0, 8)) | read("box", each(0, 8))
    assert found(graph) == expected(
        made("s1", each(0, 6)) | read("s2.conv", each(0, 6)) | read("l1", each(0, 6)),
        made("s2", each(0, 8)) | read("s3.conv", each(0, 8)) | read("l2", each(0, 8)),
        made("s3", each(0, 10)) | read("l3", each(0, 10)),
        pyramid,
        features | read("tower", each(0, 8)),
        tower,
    )
    assert balances(graph) == {blocks("tower", 4, 2)}
    assert flags(graph) == {"tower": {"group norm"}}
    reasons = frozen(graph)
    assert set(reasons) == {
        ("s1.conv.weight", 1),
        *((f"{p}.{k}", 0) for p in ("cls", "box") for k in ("weight", "bias")),
    }
    assert "input" in reasons["s1.conv.weight", 1]
    assert "output" in reasons["box.bias", 0]


def _padded_groups() -> list[Places]:
    """What both padded shortcuts share: the middle channels are those of the stem, and the inner ones."""
    return [
        made("stem", each(0, 4))
        | read("conv1.conv", each(0, 4))
        | made("conv2", each(2, 6))
        | read("head.fc", each(2, 6)),
        made("conv1", each(0, 6)) | read("conv2.conv", each(0, 6)),
    ]


def test_padded_shortcut():
    """The zero channels meet four of conv2's eight; they can go, and the numbers in the shortcut follow."""
    graph = CASES["padded"].graph()
    around = [0, 1, 6, 7]
    assert found(graph) == expected(*_padded_groups(), made("conv2", around) | read("head.fc", around))
    check_ends(graph, "stem.conv", "head.fc")
    assert {(item.module, item.name) for item in graph.attributes} == {("shortcut", "front"), ("shortcut", "back")}


def test_padded_shortcut_whose_numbers_are_out_of_reach():
    graph = CASES["padded-lambda"].graph()
    assert found(graph) == expected(*_padded_groups())
    stuck = {(item.parameter, item.dim): item for item in graph.frozen if "fixed in Python" in item.reason}
    assert set(stuck) == {*made("conv2", []), ("head.fc.weight", 1)}
    assert all(item.index == (0, 1, 6, 7) for item in stuck.values())
    assert all("shortcut" in item.reason for item in stuck.values())


def _heads(heads: int, size: int) -> list[tuple[int, ...]]:
    """Rows of a joint q, k, v projection: those of one head in all three thirds."""
    width = heads * size
    return [tuple(third * width + head * size + i for third in range(3) for i in range(size)) for head in range(heads)]


def _stream(attention: Places) -> Places:
    """The residual stream of a ``Transformer``: eight channels."""
    stream = (
        rows("embed", each(0, 8)) | rows("mlp.fc2", each(0, 8)) | read("mlp.fc1", each(0, 8)) | read("head", each(0, 8))
    )
    for norm in ("norm1", "norm2", "norm"):
        stream |= rows(norm, each(0, 8))
    return stream | attention


def _hidden() -> Places:
    return rows("mlp.fc1", each(0, 10)) | read("mlp.fc2", each(0, 10))


def test_attention():
    """Heads of three channels are the units; the stream and the hidden layer are free channel by channel."""
    graph = CASES["attention"].graph()
    assert found(graph) == expected(
        _stream(read("attn.qkv", each(0, 8)) | rows("attn.proj", each(0, 8))),
        rows("attn.qkv", _heads(4, 3)) | read("attn.proj", runs(4, 3)),
        _hidden(),
    )
    check_ends(graph, "embed", "head")
    assert balances(graph) == set()
    assert flags(graph) == {"embed": {"layer norm"}}
    assert ("attn", "num_heads") in {(item.module, item.name) for item in graph.attributes}


def test_attention_with_a_table_of_biases():
    graph = CASES["attention-biased"].graph()
    stream, heads = rows("attn.proj", each(0, 8)), read("attn.proj", runs(4, 3))
    for name in ("attn.q", "attn.k", "attn.v"):
        stream |= read(name, each(0, 8))
        heads |= rows(name, runs(4, 3))
    assert found(graph) == expected(_stream(stream), heads | {("attn.table", 1): each(0, 4)}, _hidden())
    assert flags(graph) == {"embed": {"layer norm"}}


@pytest.mark.parametrize("name", ["multihead", "multihead-sequence-first", "multihead-weights"])
def test_multihead_attention(name):
    graph = CASES[name].graph()
    joint = {("attn.in_proj_weight", 0): _heads(4, 2), ("attn.in_proj_bias", 0): _heads(4, 2)}
    assert found(graph) == expected(
        rows("embed", each(0, 8)) | {("attn.in_proj_weight", 1): each(0, 8)} | rows("attn.out_proj", each(0, 8))
        | read("head", each(0, 8)),
        joint | read("attn.out_proj", runs(4, 2)),
    )  # fmt: skip
    check_ends(graph, "embed", "head")


def test_single_head_attention_goes_channel_by_channel():
    graph = CASES["one-head"].graph()
    stream = rows("embed", each(0, 8))
    for name in ("q", "k", "v"):
        stream |= read(name, each(0, 8))
    assert found(graph) == expected(
        stream, rows("q", each(0, 6)) | rows("k", each(0, 6)), rows("v", each(0, 10)) | read("head", each(0, 10))
    )
    assert flags(graph) == {"q": {"attention scale"}}


def test_glu_ties_the_halves():
    pairs = [(unit, unit + 6) for unit in range(6)]
    stream = rows("embed", each(0, 8)) | read("fc1", each(0, 8)) | rows("fc2", each(0, 8)) | read("head", each(0, 8))
    for name in ("glu", "swiglu"):
        graph = CASES[name].graph()
        assert found(graph) == expected(stream, rows("fc1", pairs) | read("fc2", each(0, 6)))
        assert balances(graph) == set()


def test_mixer_channels_do_not_depend_on_the_batch():
    """Both MLPs and the stream are free; the tokens, which come from the input, are not."""
    graph = CASES["mixer"].graph()
    stream = (
        rows("embed", each(0, 8)) | rows("norm1", each(0, 8)) | rows("norm2", each(0, 8)) | read("head", each(0, 8))
    )
    stream |= read("channels.fc1", each(0, 8)) | rows("channels.fc2", each(0, 8))
    assert found(graph) == expected(
        stream,
        rows("tokens.fc1", each(0, 9)) | read("tokens.fc2", each(0, 9)),
        rows("channels.fc1", each(0, 10)) | read("channels.fc2", each(0, 10)),
    )
    assert "input" in frozen(graph)["tokens.fc1.weight", 1]


def test_split_by_a_width_in_an_attribute():
    """Res2Net: part by part, what is added together is tied; the parts must keep equally many."""
    graph = CASES["res2net"].graph()
    stream = (
        made("stem", each(0, 8))
        | read("conv1.conv", each(0, 8))
        | made("conv3", each(0, 8))
        | read("head.fc", each(0, 8))
    )
    second = made("conv1", each(4, 8)) | made("convs.0", each(0, 4)) | read("convs.1.conv", each(0, 4))
    assert found(graph) == expected(
        stream,
        made("conv1", each(0, 4)) | read("convs.0.conv", each(0, 4)),
        second | read("conv3.conv", each(0, 4)),
        made("convs.1", each(0, 4)) | read("conv3.conv", each(4, 8)),
        made("conv1", each(8, 12)) | read("conv3.conv", each(8, 12)),
    )
    parts = ("conv1.conv", "conv1.conv#2", "conv1.conv#3")
    assert balances(graph) == {frozenset(tuple((part, unit) for unit in range(4)) for part in parts)}
    assert ("", "width") in {(item.module, item.name) for item in graph.attributes}


def test_halves_cut_by_one_number_keep_equally_many():
    graph = CASES["halves"].graph()
    assert found(graph) == expected(
        made("stem", each(0, 4)) | read("head.fc", each(0, 4)),
        made("stem", each(4, 8)) | read("branch.conv", each(0, 4)),
        made("branch", each(0, 6)) | read("head.fc", each(4, 10)),
    )
    halves = ("stem.conv", "stem.conv#2")
    assert balances(graph) == {frozenset(tuple((half, unit) for unit in range(4)) for half in halves)}
    assert ("", "c") in {(item.module, item.name) for item in graph.attributes}


def test_reversible_halves():
    graph = CASES["reversible"].graph()
    first, second = (0, 4), (4, 8)
    assert found(graph) == expected(
        made("stem", each(*first)) | made("f", each(0, 4)) | read("g.conv", each(0, 4)) | read("head.fc", each(*first)),
        made("stem", each(*second))
        | made("g", each(0, 4))
        | read("f.conv", each(0, 4))
        | read("head.fc", each(*second)),
    )
    assert len(graph.balances) == 1


def test_module_used_twice_ties_what_it_reads_to_what_it_makes():
    graph = CASES["shared-module"].graph()
    assert found(graph) == expected(
        made("stem", each(0, 8)) | read("shared", each(0, 8)) | rows("shared", each(0, 8)) | read("head.fc", each(0, 8))
    )


def test_tied_weights_appear_once():
    graph = CASES["tied-weights"].graph()
    assert found(graph) == expected(
        {("embed.weight", 1): each(0, 8)} | read("mlp.fc1", each(0, 8)) | rows("mlp.fc2", each(0, 8)),
        rows("mlp.fc1", each(0, 10)) | read("mlp.fc2", each(0, 10)),
    )
    assert any(word in frozen(graph)["embed.weight", 0] for word in ("looked up", "output"))


def test_transposed_convolutions():
    assert found(CASES["transposed"].graph()) == expected(
        made("stem", each(0, 8)) | {("up.weight", 0): each(0, 8)},
        {("up.weight", 1): each(0, 6), ("up.bias", 0): each(0, 6)} | read("last", each(0, 6)),
    )
    graph = CASES["transposed-grouped"].graph()
    made_by_up = {(f"bn.{name}", 0): each(0, 12) for name in ("weight", "bias", "running_mean", "running_var")}
    assert found(graph) == expected(
        made("stem", each(0, 8)) | {("up.weight", 0): each(0, 8)},
        made_by_up | {("up.weight", 1): [0, 1, 2] * 4, ("up.bias", 0): each(0, 12)} | read("last", each(0, 12)),
    )
    assert balances(graph) == {blocks("stem.conv", 4, 2), blocks("up", 4, 3)}


def test_norms_over_channels():
    graph = CASES["group-norm"].graph()
    assert flags(graph) == {"conv1": {"group norm"}, "conv2": {"group norm"}}
    assert balances(graph) == {blocks("conv1", 2, 4)}
    graph = CASES["convnext"].graph()
    stream = rows("stem", each(0, 8)) | rows("dw", each(0, 8)) | rows("norm", each(0, 8)) | rows("fc2", each(0, 8))
    assert found(graph) == expected(
        stream | {("gamma", 0): each(0, 8)} | read("fc1", each(0, 8)) | read("head", each(0, 8)),
        rows("fc1", each(0, 12)) | read("fc2", each(0, 12)),
    )
    assert flags(graph) == {"stem": {"layer norm"}}


def test_instance_norm():
    norm = {(f"norm1.{name}", 0): each(0, 8) for name in ("weight", "bias", "running_mean", "running_var")}
    assert found(CASES["instance-norm"].graph()) == expected(
        rows("conv1", each(0, 8)) | norm | read("conv2", each(0, 8)),
        rows("conv2", each(0, 6)) | read("head.fc", each(0, 6)),
    )


def normed(layer: str, outputs: list) -> dict:
    weight = f"{layer}.parametrizations.weight"
    return {(f"{weight}.original0", 0): outputs, (f"{weight}.original1", 0): outputs, (f"{layer}.bias", 0): outputs}


def test_a_weight_norm_reads_and_makes_channels():
    graph = CASES["weight-norm"].graph()
    assert found(graph) == expected(
        normed("stem", each(0, 8)) | {("body.parametrizations.weight.original1", 1): each(0, 8)},
        normed("body", each(0, 6)) | read("last.conv", each(0, 6)),
        made("last", each(0, 6)) | read("head.fc", each(0, 6)),
    )
    roles = {member.parameter: member.role for member in graph.groups[0].members}
    assert roles["stem.parametrizations.weight.original0"] == "produces"
    assert roles["stem.parametrizations.weight.original1"] == "follows"


def test_what_is_left_of_a_normed_weight_stays_as_it_is():
    case = CASES["weight-norm"]
    model, keep = case.model(), {case.graph().groups[0].name: torch.arange(8) > 2}
    before = model.body.weight.detach()
    ifso.compact_(model, case.graph(), keep)
    torch.testing.assert_close(model.body.weight.detach(), before[:, 3:], rtol=1e-12, atol=0)


def test_outputs_are_frozen_whatever_form_they_have():
    reasons = frozen(CASES["many-outputs"].graph())
    for name in (*(key for key, _ in made("s1", [])), "head.fc.weight"):
        assert "output" in reasons[name, 0]
    reasons = frozen(CASES["dict-outputs"].graph())
    assert "output" in reasons["out.weight", 0]
    assert "output" in reasons["aux.bias", 0]


def test_constants_outside_the_model_freeze_and_buffers_follow():
    reasons = frozen(CASES["constant-per-channel"].graph())
    assert "constant" in reasons["stem.conv.weight", 0]
    assert found(CASES["buffer-per-channel"].graph()) == expected(
        made("stem", each(0, 8)) | {("shift", 0): each(0, 8)} | read("body.conv", each(0, 8)),
        made("body", each(0, 6)) | read("head.fc", each(0, 6)),
    )


def test_code_that_insists_on_a_size_freezes_the_channels_with_the_place():
    reasons = frozen(CASES["insistent-code"].graph())
    assert "Python" in reasons["stem.conv.weight", 0]
