"""Several processes: together they see what one would see."""

import pytest
import torch

from ifso.data import open_data
from ifso.data.batches import Shard, in_turn
from ifso.errors import DataError


class TestIndices:
    @pytest.mark.parametrize("count", [0, 1, 5, 12, 13, 17, 23, 24, 29])
    @pytest.mark.parametrize("ranks", [1, 2, 3])
    @pytest.mark.parametrize("drop_last", [True, False])
    def test_slices_of_joint_batches_written_out(self, count, ranks, drop_last):
        batch = 4
        expected = [[] for _ in range(ranks)]
        for first in range(0, count, ranks * batch):
            joint = list(range(first, min(first + ranks * batch, count)))
            if len(joint) < ranks * batch:
                joint = [] if drop_last else joint[: len(joint) - len(joint) % ranks]
            each = len(joint) // ranks
            for rank in range(ranks):
                expected[rank] += joint[rank * each : (rank + 1) * each]
        shards = [Shard(rank, ranks) for rank in range(ranks)]
        if not expected[0]:
            for shard in shards:
                with pytest.raises(DataError, match="cannot be filled"):
                    shard.indices(count, batch, drop_last)
        else:
            assert [shard.indices(count, batch, drop_last).tolist() for shard in shards] == expected

    @pytest.mark.parametrize(("rank", "ranks"), [(1, 1), (-1, 2), (0, 0), (0.0, 1), (True, 2), ("0", 1)])
    def test_ranks_that_are_none(self, rank, ranks):
        with pytest.raises(DataError, match=f"got rank={rank!r} of ranks={ranks!r}"):
            open_data("digits", rank=rank, ranks=ranks)


class TestTraining:
    @pytest.mark.parametrize("augment", [True, False])
    def test_ranks_together_see_the_joint_batch(self, augment):
        alone = open_data("digits", seed=3, validation=100).train_batches(96, augment=augment)
        ranks = [open_data("digits", seed=3, validation=100, rank=r, ranks=3) for r in range(3)]
        parts = [data.train_batches(32, augment=augment) for data in ranks]
        for epoch in (0, 1):
            assert {len(part) for part in parts} == {len(alone)} == {13}
            for (x, y), *shares in zip(alone, *parts, strict=True):
                assert torch.equal(torch.cat([images for images, _ in shares]), x), epoch
                assert torch.equal(torch.cat([labels for _, labels in shares]), y)

    def test_all_ranks_have_equally_many_without_drop_last(self):
        parts = [list(open_data("digits", rank=r, ranks=4).train_batches(100, drop_last=False)) for r in range(4)]
        sizes = [[len(y) for _, y in part] for part in parts]
        assert sizes == [[100, 100, 100, 60]] * 4

    def test_too_many_for_the_data(self):
        data = open_data("digits", rank=1, ranks=2)
        assert len(data.train_batches(721)) == 1
        with pytest.raises(DataError, match=r"batches of 722 on each of 2 ranks cannot be filled by 1442 .*smaller"):
            data.train_batches(722)
        with pytest.raises(DataError, match="more images or fewer ranks"):
            open_data("digits", rank=1, ranks=1443).train_batches(1, drop_last=False)


class TestPlan:
    def test_batches_are_made_from_the_plan(self):
        batches = open_data("digits", seed=1, rank=1, ranks=2).train_batches(64)
        order, moves = batches.plan(2)
        assert (order.dtype, order.shape, moves.shape) == (torch.int64, (11 * 64,), (11 * 64, 3))
        batches.set_epoch(2)
        for index, (x, y) in enumerate(batches):
            chosen = slice(64 * index, 64 * index + 64)
            images, labels = batches.make(order[chosen], moves[chosen])
            assert torch.equal(images, x)
            assert torch.equal(labels, y)
            assert torch.equal(y, batches.images.labels[order[chosen]])

    def test_planning_does_not_go_on_to_the_next_epoch(self):
        batches, again = open_data("digits").train_batches(64), open_data("digits").train_batches(64)
        batches.plan(5)
        assert torch.equal(next(iter(batches))[0], next(iter(again))[0])

    def test_no_moves_without_augmentation(self):
        order, moves = open_data("digits").train_batches(64, augment=False).plan(0)
        assert moves is None
        assert len(order.unique()) == len(order) == 22 * 64

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_making_a_batch_fits_into_a_cuda_graph(self):
        batches = open_data("digits", device="cuda").train_batches(64)
        order, moves = batches.plan(0)
        chosen, moved = order[:64].clone(), moves[:64].clone()
        for _ in range(2):
            batches.make(chosen, moved)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            made = batches.make(chosen, moved)
        for index, (x, y) in enumerate(batches):
            chosen.copy_(order[64 * index : 64 * index + 64])
            moved.copy_(moves[64 * index : 64 * index + 64])
            graph.replay()
            assert torch.equal(made[0], x)
            assert torch.equal(made[1], y)


class TestTests:
    @pytest.mark.parametrize("part", ["test_batches", "validation_batches"])
    def test_ranks_divide_the_images_among_them(self, part):
        whole = getattr(open_data("digits", validation=101), part)(1000)
        shares = [getattr(open_data("digits", validation=101, rank=r, ranks=3), part)(20) for r in range(3)]
        (expected, labels), seen = next(iter(whole)), [list(share) for share in shares]
        assert [len(found) for found in seen] == [len(share) for share in shares]
        images = [torch.cat([x for x, _ in found]) for found in seen]
        assert max(map(len, images)) - min(map(len, images)) <= 1
        for rank, mine in enumerate(images):
            assert torch.equal(mine, expected[rank::3])
            assert torch.equal(torch.cat([y for _, y in seen[rank]]), labels[rank::3])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_work_in_turn(monkeypatch, rank):
    events = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: events.append("wait"))
    assert in_turn(Shard(rank, 3), lambda: events.append("work") or 5) == 5
    assert events == ["wait"] * rank + ["work"] + ["wait"] * (3 - rank)


def test_without_a_group_nobody_waits():
    assert in_turn(Shard(1, 3), lambda: 5) == 5
