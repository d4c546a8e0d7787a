"""W3, U8, U9 and what measuring the latency leaves: networks and modes that were taken for something else."""

import copy

import pytest
import torch
import torch.nn.functional as F
from nets import keeping
from torch import Tensor, nn

import ifso
from ifso.costs.latency import LatencyModel, measure_latency
from ifso.errors import ScoreError

X = torch.linspace(-1, 1, 24).view(4, 6)


class TestAttention:
    """W3"""

    class OneHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(6, 8) for _ in range(3))
            self.o = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))

    @pytest.mark.parametrize("preset", [None, "paper"])
    def test_values_narrower_than_queries(self, preset: str | None) -> None:
        torch.manual_seed(0)
        model, batches = self.OneHead(), [(torch.randn(4, 5, 6), torch.randn(4, 5, 3))]
        result = ifso.prune(
            model, batches, lambda net, batch: (net(batch[0]) - batch[1]).square().mean(), preset=preset,
            budget=ifso.Budget(macs=0.6), example_inputs=batches[0][0], progress=False,
        )  # fmt: skip
        assert all(check.passed for check in result.checks)
        assert model.q.out_features != model.v.out_features


class TestComplexNumbers:
    """U8"""

    def test_the_reason_is_true(self) -> None:
        model = nn.Sequential(nn.Linear(6, 8, dtype=torch.complex64), nn.Linear(8, 3, dtype=torch.complex64))
        graph = ifso.trace(model, X.to(torch.complex64))
        assert {frozen.reason for frozen in graph.frozen} == {"holds complex numbers, which are not followed"}
        assert len(graph.frozen) == 4


class TestInferenceMode:
    """U9: a network stays one that can be trained, and the same comes out."""

    @staticmethod
    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))

    IMAGES = torch.linspace(-1, 1, 2 * 3 * 81).view(2, 3, 9, 9)
    KEEP = {"0": torch.arange(8) > 2}  # noqa: RUF012

    @staticmethod
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    def assert_trainable(self, model: nn.Module) -> None:
        assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
        self.loss(model.train(), self.IMAGES).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    def test_trace_and_score(self) -> None:
        model = self.network()
        graph = ifso.trace(model, self.IMAGES)
        wanted = ifso.score(model, graph, self.loss, [self.IMAGES])
        with torch.inference_mode():
            within = ifso.trace(model, self.IMAGES)
            found = ifso.score(model, within, self.loss, [self.IMAGES])
        assert str(within) == str(graph)
        assert torch.equal(found["0"], wanted["0"])
        self.assert_trainable(model)

    def test_masked_and_compact(self) -> None:
        model = self.network().eval()
        graph = ifso.trace(model, self.IMAGES)
        with torch.inference_mode():
            with ifso.masked(model, graph, self.KEEP):
                soft = model(self.IMAGES)
            assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
            ifso.compact_(model, graph, self.KEEP)
            torch.testing.assert_close(model(self.IMAGES), soft)
        self.assert_trainable(model)

    @pytest.mark.parametrize("preset", [None, "paper"])
    def test_prune(self, preset: str | None) -> None:
        model = self.network()
        with torch.inference_mode():
            result = ifso.prune(
                model, [self.IMAGES], self.loss, budget=ifso.Budget(macs=0.6), example_inputs=self.IMAGES,
                preset=preset, progress=False,
            )  # fmt: skip
        assert all(check.passed for check in result.checks)
        self.assert_trainable(model)

    def test_load(self, tmp_path) -> None:
        ifso.save(self.network(), tmp_path)
        model = self.network()
        with torch.inference_mode():
            ifso.load(tmp_path, model)
        self.assert_trainable(model)

    def test_what_needs_gradients_of_the_user_says_so(self) -> None:
        model = self.network()
        graph = ifso.trace(model, self.IMAGES)
        with torch.inference_mode(), pytest.raises(ScoreError, match="no_grad or inference_mode"):
            ifso.true_loss_change(model, graph, self.KEEP, self.loss, [self.IMAGES])


WRITING = [
    name for name in keeping.NETWORKS if name.startswith(("weight-", "buffer-", "binarised", "max-norm", "spectral"))
]


class TestLatency:
    """Measuring runs the network many times; one that writes into its weights had others afterwards."""

    @pytest.mark.parametrize("name", WRITING)
    @pytest.mark.parametrize("warm_up", [0, 2])
    def test_weights_are_as_before(self, name: str, warm_up: int) -> None:
        torch.manual_seed(0)
        model = keeping.NETWORKS[name]()
        before = copy.deepcopy(model.state_dict())
        measure_latency(model, X, repeats=2, warm_up=warm_up)
        graph = ifso.trace(model, X)
        if graph.groups:
            LatencyModel.measure(model, graph, repeats=2, warm_up=warm_up)
        after = model.state_dict()
        assert list(before) == list(after)
        assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
