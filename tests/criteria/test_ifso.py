"""The paper's score against dense float64 matrices, and the authors' program against its own formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from cases import CASES
from reference.second_order import Reference
from torch import nn

import ifso
from ifso.common.torch_state import undisturbed
from ifso.criteria.base import Task
from ifso.criteria.ifso import Ifso
from ifso.curvature.primal_cache import PrimalCache
from ifso.curvature.products import Products
from ifso.curvature.weight_space import weight_space
from ifso.errors import ScoreError

TOLERANCE = 1e-6


class Tiny(nn.Module):
    """Batch norm, a residual add, and a convolution that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.inner = nn.Conv2d(4, 3, 3, padding=1)
        self.outer = nn.Conv2d(3, 4, 1)
        self.twice = nn.Conv2d(4, 4, 1)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        """[N, 2, H, W] → [N, 3]."""
        x = F.relu(self.bn(self.stem(x)))
        x = x + self.outer(torch.tanh(self.inner(x)))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.fc(x.mean((2, 3)))


def loss_fn(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


@pytest.fixture(params=[True, False], ids=["train", "eval"])
def tiny(request):
    torch.manual_seed(3)
    model = Tiny().double()
    images, labels = torch.randn(6, 2, 5, 5).double(), torch.randint(0, 3, (6,))
    model.train()(images)
    graph = ifso.trace(model.eval(), images)
    return model.train(request.param), graph, (images, labels)


def reference(model, graph, batch):
    names = list(weight_space(model, graph).tensors)
    return Reference(model, graph, loss_fn, batch, names)


def scores(model, graph, batch, **options):
    return torch.cat(list(ifso.score(model, graph, loss_fn, [batch], **options).values()))


def close(found, wanted):
    assert float((found - wanted).norm() / wanted.norm()) <= TOLERANCE


def dense_inverse(inverse, options, truth, hessian):
    n = len(hessian)
    eye = torch.eye(n, dtype=torch.float64)
    if inverse == "identity":
        return options.get("scale", 1.0) * eye
    if inverse == "cg":
        return torch.linalg.inv(hessian + options["damping"] * eye)
    series, power = torch.zeros_like(eye), eye
    for _ in range(options["terms"] + 1):
        series, power = series + power, power @ (eye - options["step"] * hessian)
    return options["step"] * series


@pytest.mark.parametrize("coupled", ["shared", "layers"])
@pytest.mark.parametrize(
    ("inverse", "options"),
    [
        ("identity", {}),
        ("identity", {"scale": 10.0}),
        ("neumann", {"terms": 2, "step": 0.05}),
        ("cg", {"damping": 5.0, "tolerance": 1e-11, "iterations": 2000}),
    ],
    ids=["identity", "scaled", "neumann", "cg"],
)
def test_definition_1(tiny, inverse, options, coupled):
    model, graph, batch = tiny
    truth = reference(model, graph, batch)
    by_place = truth.mixed
    v = by_place.sum((0, 1))
    u = dense_inverse(inverse, options, truth, truth.hessian) @ v
    parts = by_place @ u
    wanted = parts.sum(0).abs() if coupled == "shared" else parts.abs().sum(0)
    close(scores(model, graph, batch, inverse=inverse, inverse_options=options, coupled=coupled), wanted)


def test_sherman_morrison_on_the_empirical_fisher(tiny):
    model, graph, batch = tiny
    model.eval()
    truth = reference(model, graph, batch)
    rows = [reference(model, graph, (image[None], label[None])).gradient for image, label in zip(*batch, strict=True)]
    fisher = torch.stack(rows).t() @ torch.stack(rows) / len(rows)
    u = torch.linalg.solve(fisher + 0.1 * torch.eye(len(fisher)).double(), truth.mixed.sum((0, 1)))
    wanted = (truth.mixed @ u).sum(0).abs()
    close(scores(model, graph, batch, inverse="sherman-morrison", inverse_options={"damping": 0.1}), wanted)


def test_kfac_gives_scores_and_damping_leads_to_the_identity(tiny):
    model, graph, batch = tiny
    model.eval()
    plain = scores(model, graph, batch)
    damped = scores(model, graph, batch, inverse="kfac", inverse_options={"damping": 1e6})
    close(damped / damped.norm(), plain / plain.norm())
    assert bool(scores(model, graph, batch, inverse="kfac").isfinite().all())


def test_removed_units_are_in_no_sum(tiny):
    model, graph, batch = tiny
    keep = graph.keep_all()
    keep[graph.groups[0].name][1] = False
    with ifso.masked(model, graph, keep):
        truth = reference(model, graph, batch)
    kept = graph.kept(keep)[:-1].double()
    alive = torch.cat([(tensor != 0).flatten() for tensor in truth.w.values()]).double()
    u = truth.mixed_sum(kept) * alive
    close(scores(model, graph, batch, keep=keep), truth.mixed_times(u).sum(0).abs() * kept)


def test_micro_batches_add_up(tiny):
    model, graph, batch = tiny
    model.eval()
    close(scores(model, graph, batch, micro_batch=4), scores(model, graph, batch))


def test_several_batches_are_averaged_after_the_absolute_value(tiny):
    model, graph, batch = tiny
    other = (batch[0].flip(0) * 0.3, batch[1])
    both = torch.cat(list(ifso.score(model, graph, loss_fn, iter([batch, other])).values()))
    close(both, (scores(model, graph, batch) + scores(model, graph, other)) / 2)


@pytest.mark.parametrize("name", ["residual", "in-place", "grouped", "depthwise"])
def test_passes_that_share_their_primal_compute_the_same(name):
    case = CASES[name]
    model, inputs = case.model().train(), case.inputs()

    def mean_square(model, batch):
        return model(batch).square().mean()

    products = Products(model, case.graph(), mean_square)
    apart = products.mixed(inputs)
    primal = PrimalCache()
    together = products.mixed(inputs, primal)
    assert primal.calls
    close(together, apart)
    close(products.sensitivity(inputs, together, primal), products.sensitivity(inputs, apart))
    close(products.hessian(inputs, together, primal), products.hessian(inputs, apart))


def test_float32_ranks_like_float64():
    torch.manual_seed(0)
    model = ifso.create_model("ifso:resnet20").train()
    batch = torch.randn(16, 3, 16, 16), torch.randint(0, 10, (16,))
    graph = ifso.trace(model, batch[0][:1])
    single = scores(model, graph, batch)
    double = scores(model.double(), graph, (batch[0].double(), batch[1]))
    ranks = torch.stack([single.argsort().argsort(), double.argsort().argsort()]).double()
    assert float(torch.corrcoef(ranks)[0, 1]) >= 0.999


class TestAuthors:
    """Finite differences written out with masks on the activations, as the authors' program has them."""

    @staticmethod
    def by_hand(model, batch, kept, step=1e-2, weight_decay=1e-4):
        layers = [module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
        masks = [torch.ones(layer.weight.shape[1]).double() for layer in layers]
        for layer, mask in zip(layers, masks, strict=True):
            mask.mul_(kept.get(layer, torch.ones_like(mask)))

        def gradients(wanted):
            for mask in masks:
                mask.requires_grad_(wanted == "masks")
            handles = [
                layer.register_forward_pre_hook(
                    lambda _, args, mask=mask: (args[0] * mask.view(-1, *[1] * (args[0].dim() - 2)),)
                )
                for layer, mask in zip(layers, masks, strict=True)
            ]
            inputs = masks if wanted == "masks" else [layer.weight for layer in layers]
            with undisturbed(model):
                found = torch.autograd.grad(loss_fn(model, batch), inputs)
            for handle in handles:
                handle.remove()
            for mask in masks:
                mask.requires_grad_(False)
            return found

        def difference(tensors, direction, wanted):
            size = step / torch.cat([part.flatten() for part in direction]).norm()
            ends = []
            with torch.no_grad():
                for sign in (1, -1):
                    saved = [tensor.clone() for tensor in tensors]
                    for tensor, part in zip(tensors, direction, strict=True):
                        tensor.add_(sign * size * part)
                    with torch.enable_grad():
                        ends.append(gradients(wanted))
                    for tensor, old in zip(tensors, saved, strict=True):
                        tensor.copy_(old)
            return [(up - down) / (2 * size) for up, down in zip(*ends, strict=True)]

        v = difference(masks, [torch.ones_like(mask) for mask in masks], "weights")
        u = [part / weight_decay for part in v]
        found = difference([layer.weight.data for layer in layers], u, "masks")
        return {layer: part.abs() for layer, part in zip(layers, found, strict=True)}

    @pytest.mark.parametrize("removed", [False, True], ids=["whole", "unit removed"])
    def test_same_numbers_as_the_program(self, tiny, removed):
        model, graph, batch = tiny
        model.train()
        keep = graph.keep_all()
        if removed:
            keep["inner"][1] = False
        found = ifso.score(model, graph, loss_fn, [batch], "authors", keep=keep)
        by_layer = self.by_hand(model, batch, {model.outer: keep["inner"].double()})
        inner = by_layer[model.outer] * keep["inner"]
        stream = by_layer[model.inner] + by_layer[model.twice] + by_layer[model.fc]
        assert set(found) == {"stem", "inner"}
        close(found["inner"], inner)
        close(found["stem"], stream)

    def test_small_steps_lead_to_the_exact_score(self, tiny):
        model, graph, batch = tiny
        model.train()
        step = torch.cat(list(ifso.score(model, graph, loss_fn, [batch], "authors", step=1e-5).values()))
        exact = self.with_image_moved(model, graph, batch)
        assert float((step * 1e-4 - exact).norm() / exact.norm()) <= 1e-4

    @staticmethod
    def with_image_moved(model, graph, batch):
        """The exact score with the all-ones vector on the image's channels too."""
        truth = reference(model, graph, batch)
        products = Products(model, graph, loss_fn)
        on_image = torch.cat([torch.full_like(w, name == "stem.weight").flatten() for name, w in truth.w.items()])
        direction = products.space.current() * on_image
        v = truth.mixed.sum((0, 1)) + truth.hessian @ direction + truth.gradient * on_image
        return products.sensitivity(batch, v).abs().sum(0)


class TestBadOptions:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"inverse": "exact"}, "inverse must be .*'exact'"),
            ({"inverse": "cg", "inverse_options": {"speed": 2}}, "no option 'speed'"),
            ({"coupled": "both"}, "coupled must be"),
            ({"micro_batch": 0}, "micro_batch must be"),
            ({"weights": "some"}, "weights must be"),
            ({"inverse_options": {"scale": math.nan}}, "scale"),
        ],
    )
    def test_are_refused_before_any_work(self, options, words):
        with pytest.raises(ScoreError, match=words):
            Ifso(**options)

    def test_a_batch_that_cannot_be_cut(self, tiny):
        model, graph, (images, labels) = tiny
        task = Task(model, graph, lambda model, batch: loss_fn(model, batch[:2]), graph.kept(None))
        with pytest.raises(ScoreError, match="first dims"):
            Ifso(micro_batch=2).units(task, (images, labels, torch.zeros(3)))
