"""What networks are worth and take: against counts by hand, and against what must hold of any measurement."""

import copy
import json
import queue

import evaluation_rank
import pytest
import torch
from processes import ranks_of
from torch import nn

from ifso.costs.latency import Latency
from ifso.data import open_data
from ifso.errors import DataError, IfsoError
from ifso.tasks.classification import cross_entropy
from ifso.training import profiling as measuring
from ifso.training.evaluation import evaluate, quality
from ifso.training.profiling import Timing, costs_of, hardware, in_memory_format, time_forward, training_peak

WIDTH, DEPTH = 64, 10
ROW = 4 * WIDTH
WEIGHTS = DEPTH * WIDTH * ROW


class Deep(nn.Sequential):
    """Tanh is kept for backward and, in the same memory, as the input of the next layer: one row per layer."""

    def __init__(self):
        super().__init__(*(m for _ in range(DEPTH) for m in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())))


def mean_of(model, batch):
    return model(batch[0]).sum()


def peak(model, count):
    return training_peak(model, (torch.ones(count, WIDTH),), mean_of, "float32")


class TestTrainingPeak:
    def test_grows_by_the_activations_that_are_kept(self):
        model = Deep()
        grown = (peak(model, 6000) - peak(model, 4000)) / 2000
        assert (DEPTH + 1) * ROW <= grown <= (DEPTH + 4) * ROW

    def test_weights_momentum_and_gradients_are_in_it(self):
        assert 3 * WEIGHTS <= peak(Deep(), 1) <= 4.2 * WEIGHTS

    def test_half_precision_keeps_less(self):
        batch = (torch.ones(4000, WIDTH),)
        full, half = (training_peak(Deep(), batch, mean_of, name) for name in ("float32", "bf16"))
        assert half < 0.7 * full

    def test_the_network_is_left_alone(self):
        model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
        before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        peak(model, 8)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert not any(module.training for module in model.modules())
        assert model[0].weight.grad is None
        assert torch.equal(torch.get_rng_state(), state)

    def test_refused(self):
        with pytest.raises(IfsoError, match="no parameter of the network is to be trained"):
            peak(Deep().requires_grad_(False), 2)
        with pytest.raises(IfsoError, match=r"loss_fn failed: RuntimeError: .*give batches of the shape"):
            training_peak(Deep(), (torch.ones(2, 3),), mean_of, "float32")

    def test_memory_that_runs_out_is_one_line(self):
        def greedy(model, batch):
            return model(batch[0]).sum() + torch.empty(2**50).sum()

        with pytest.raises(IfsoError, match="not enough memory for training on a batch of 2; give smaller batches"):
            training_peak(Deep(), (torch.ones(2, WIDTH),), greedy, "float32")


class Noted(nn.Module):
    """Writes down its name, the batch and the mode whenever it is called."""

    def __init__(self, name, calls):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.name, self.note = name, calls.append

    def forward(self, x):
        self.note((self.name, len(x), self.training, torch.is_grad_enabled()))
        return x * self.weight


class TestTimed:
    def test_networks_take_turns_and_are_warm(self):
        calls = []
        models = {name: Noted(name, calls) for name in "ab"}
        found = time_forward(models, torch.zeros(1, 3), 6, "float32", repeats=7)
        assert [len(found[name].latency.samples) for name in "ab"] == [7, 7]
        assert set(calls) == {(name, 6, False, False) for name in "ab"}
        order = "".join(name for name, *_ in calls)
        shares = (3 + 2, 1 + 2, 1 + 3)
        assert order == "".join("a" * share + "b" * share for share in shares)
        assert all(min(f.latency.samples) <= f.latency.median <= max(f.latency.samples) for f in found.values())

    def test_stops_when_time_is_up(self):
        found = time_forward({"a": Noted("a", [])}, torch.zeros(1, 3), 2, "float32", repeats=7, seconds=0.0)
        assert len(found["a"].latency.samples) == 2

    def test_the_layout_and_precision_that_are_asked_for(self):
        seen = queue.SimpleQueue()

        class Conv(nn.Conv2d):
            def forward(self, x):
                found = super().forward(x)
                seen.put((x.is_contiguous(memory_format=torch.channels_last), found.dtype))
                return found

        inputs = in_memory_format(torch.zeros(1, 3, 4, 4), channels_last=True)
        time_forward({"a": Conv(3, 2, 1)}, inputs, 2, "bf16", repeats=1)
        assert {seen.get() for _ in range(seen.qsize())} == {(True, torch.bfloat16)}

    def test_throughput(self):
        assert Timing(32, Latency(0.5, 0.0, (0.5,))).throughput == 64

    def test_refused(self):
        with pytest.raises(IfsoError, match="repeats and batch must be 1 or more, got 0 and 4"):
            time_forward({}, torch.zeros(1, 3), 4, "float32", repeats=0)

    def test_a_batch_that_memory_cannot_hold_is_one_line(self, monkeypatch):
        def full(tensors):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2 bytes")

        monkeypatch.setattr(torch, "cat", full)
        with pytest.raises(IfsoError, match="not enough memory for a batch of 4; give smaller batches"):
            time_forward({"a": Noted("a", [])}, torch.zeros(1, 3), 4, "float32")


class TestCounted:
    def test_costs_are_of_one_image(self):
        model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 36, 5))
        for precision, size in (("float32", 4), ("fp16", 2)):
            found, memory = costs_of(model, torch.zeros(7, 1, 8, 8), precision)
            assert (found.macs, found.params) == (36 * 27 + 3 * 36 * 5, 27 + 3 + 3 * 36 * 5 + 5)
            assert memory == size * (36 * 3 + 5)

    def test_a_batch_norm_on_one_value_in_train_mode(self):
        model = nn.Sequential(nn.Conv2d(1, 3, 8), nn.BatchNorm2d(3), nn.Flatten()).train()
        assert costs_of(model, torch.zeros(1, 1, 8, 8), "float32")[0].macs == 3 * 64
        assert all(module.training for module in model.modules())


class TestQuality:
    def test_accuracy_of_a_classifier(self):
        data = open_data("digits")
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        found = quality(model, data, data.test_batches(100), "float32", over_ranks=False)
        truth = evaluate(model, data.test_batches(355))
        assert (found.top1, found.top5, found.samples) == (truth.top1, truth.top5, 355)
        assert found.loss == pytest.approx(truth.loss)

    def test_data_with_a_loss_of_its_own(self):
        class Own:
            name = "own"

            @staticmethod
            def loss_fn(model, batch):
                return model(batch["x"]).mean()

        batches = [{"x": torch.full((n, 2), float(n))} for n in (1, 3)]
        found = quality(nn.Identity(), Own(), batches, "float32", over_ranks=False)
        assert (found.loss, found.samples, found.top1, found.top5) == (2.0, 4, None, None)


class TestLabels:
    @pytest.mark.parametrize(("labels", "wrong"), [([0, 3, 9], 9), ([-1, 2, 7], -1), ([-100, 0, 1], -100)])
    def test_outside_the_classes(self, labels, wrong):
        batches = [(torch.zeros(1, 4), torch.tensor([label])) for label in labels]
        with pytest.raises(DataError, match=rf"^label {wrong} is none of the 4 classes of the network \(0 to 3\); "):
            evaluate(nn.Identity(), batches)

    def test_of_another_kind(self):
        with pytest.raises(DataError, match=r"labels of shape \(2,\) and torch.float32 cannot be compared"):
            evaluate(nn.Identity(), [(torch.zeros(2, 4), torch.zeros(2))])
        with pytest.raises(DataError, match=r"labels of shape \(2, 4\)"):
            evaluate(nn.Identity(), [(torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.long))])

    def test_bytes_will_do(self):
        logits = torch.eye(4)[:3]
        assert evaluate(nn.Identity(), [(logits, torch.tensor([0, 1, 3], dtype=torch.uint8))]).top1 == pytest.approx(
            200 / 3
        )


def test_ranks_find_together_what_one_finds(tmp_path):
    ranks_of(evaluation_rank.main, 2, tmp_path)
    printed = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for rank, (found, alone) in enumerate(printed):
        for name in ("uneven", "empty"):
            assert found[name] == pytest.approx(alone)
        assert found["nothing"].startswith("there is nothing to evaluate on")
        assert found["own"] == (20, 11)[rank]
    assert printed[0][0]["failing"] == "stopped, because rank 1 failed; see its own message"
    assert printed[1][0]["failing"].startswith("label 15 is none of the 7 classes")


def test_hardware_is_told(monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Abacus 3000\n")
    monkeypatch.setattr(measuring, "CPU_INFO", tmp_path / "cpuinfo")
    assert hardware("cpu") == {
        "device": "Abacus 3000",
        "cpu": "Abacus 3000",
        "cpu_cores": hardware("cpu")["cpu_cores"],
        "threads": torch.get_num_threads(),
    }
    monkeypatch.setattr(measuring, "CPU_INFO", tmp_path / "gone")
    assert hardware("cpu")["cpu"]


def test_training_peak_takes_the_losses_of_data():
    data = open_data("digits")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    batch = next(iter(data.train_batches(32)))
    resident = 2 * 4 * 650 + 32 * 64 * 4 + 32 * 8
    assert resident + 4 * 650 + 4 * 320 <= training_peak(model, batch, cross_entropy, "float32") <= 3 * resident
