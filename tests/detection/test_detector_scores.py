"""Scores of detectors against slow float64 truth: frozen norms, a pyramid, a head shared over levels, regions."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import enliven_
from mini import MiniRetina, MiniTwoStage, doubled, scene
from reference.second_order import Reference
from torchvision.ops import FrozenBatchNorm2d

import ifso
from ifso.common.batches import num_samples, pieces
from ifso.criteria.ifso import Ifso
from ifso.curvature.weight_space import weight_space
from ifso.errors import ScoreError
from ifso.tasks.detection import detection_loss

EXACT = 1e-8


@pytest.fixture(params=["train", "eval"])
def retina(request):
    model = enliven_(MiniRetina().double())
    batch = doubled(scene())
    graph = ifso.trace(model.eval(), (batch[0][:1],))
    return model.train(request.param == "train"), graph, batch


def scores(model, graph, batch, criterion="ifso", **options):
    return torch.cat(list(ifso.score(model, graph, detection_loss, [batch], criterion, **options).values()))


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def test_the_papers_score_against_dense_matrices(retina):
    model, graph, batch = retina
    truth = Reference(model, graph, detection_loss, batch, list(weight_space(model, graph).tensors))
    mixed = truth.mixed.sum(0)
    wanted = (mixed @ mixed.sum(0)).abs()
    assert error(scores(model, graph, batch), wanted) <= EXACT


def test_taylor_is_the_mask_gradient(retina):
    model, graph, batch = retina
    truth = Reference(model, graph, detection_loss, batch, list(weight_space(model, graph).tensors))
    assert error(scores(model, graph, batch, "taylor"), truth.mask_gradient.sum(0).abs()) <= EXACT


def test_a_head_is_read_once_for_each_level(retina):
    """The mask of the shared tower's channels acts on both levels: scoring with one level alone gives another score."""
    model, graph, batch = retina
    alone = copy.deepcopy(model)
    alone.levels = lambda images: [MiniRetina.levels(alone, images)[0], MiniRetina.levels(alone, images)[1].detach()]
    both = ifso.score(model, graph, detection_loss, [batch], "taylor")
    one = ifso.score(alone, graph, detection_loss, [batch], "taylor")
    assert not torch.allclose(both["deep.0"], one["deep.0"], rtol=1e-3)


def test_frozen_norms_are_no_parameters_of_units_and_are_left_alone(retina):
    model, graph, batch = retina
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for criterion in ("ifso", "group-fisher", "taylor"):
        scores(model, graph, batch, criterion)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert any(isinstance(module, FrozenBatchNorm2d) for module in model.modules())


class TestGroupFisher:
    def test_one_sample_at_a_time(self):
        """Without batch statistics the mask of a sample changes its own loss alone."""
        model = enliven_(MiniRetina().double()).eval()
        images, targets = doubled(scene())
        graph = ifso.trace(model, (images[:1],))
        boxes = sum(len(target["boxes"]) for target in targets)
        wanted = torch.zeros(graph.num_units, dtype=torch.float64)
        names = list(weight_space(model, graph).tensors)
        for image, target in zip(images, targets, strict=True):
            share = len(target["boxes"]) / boxes * len(images)
            truth = Reference(model, graph, detection_loss, ([image], [target]), names)
            wanted += (share * truth.mask_gradient.sum(0)).square()
        assert error(scores(model, graph, (images, targets), "group-fisher"), wanted) <= EXACT

    @pytest.mark.parametrize("counts", [(1, 4), (3, 3), (2, 0), (1, 0)])
    def test_regions_belong_to_the_image_they_are_cut_out_of(self, counts):
        model = MiniTwoStage().double()
        images, targets = doubled(scene(counts=counts))
        graph = ifso.trace(model, (images, targets))
        names = list(weight_space(model, graph).tensors)
        wanted = torch.zeros(graph.num_units, dtype=torch.float64)
        for image, target in zip(images, targets, strict=True):
            truth = Reference(model, graph, detection_loss, ([image], [target]), names)
            wanted += truth.mask_gradient.sum(0).square()
        assert error(scores(model, graph, (images, targets), "group-fisher"), wanted) <= EXACT


class TestMicroBatches:
    def test_lists_are_cut_item_by_item(self):
        batch = scene(((16, 20), (16, 24), (16, 20)), (1, 2, 0))
        parts = list(pieces(batch, 2))
        assert num_samples(batch) == 3
        assert [len(images) for images, _ in parts] == [2, 1]
        assert parts[1][0][0] is batch[0][2]
        assert parts[1][1][0] is batch[1][2]

    def test_one_image_at_a_time_scores_the_same_where_images_do_not_meet(self):
        model = MiniTwoStage().double()
        images, targets = doubled(scene(counts=(2, 2)))
        graph = ifso.trace(model, (images, targets))
        whole = scores(model, graph, (images, targets))
        assert error(scores(model, graph, (images, targets), Ifso(micro_batch=1)), whole) <= EXACT

    def test_a_batch_that_cannot_be_cut(self):
        with pytest.raises(ScoreError, match="cannot cut a batch"):
            num_samples((torch.zeros(2, 3), [torch.zeros(3), torch.zeros(4)]))
