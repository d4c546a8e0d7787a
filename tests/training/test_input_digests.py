"""What a training began with: told by its checkpoint, and another one is refused in one line."""

import copy

import pytest
import torch
from torch import nn

from ifso.errors import RunError
from ifso.training.checkpoint import InputDigests, load_checkpoint
from ifso.training.settings import TrainSettings
from ifso.training.trainer import TrainerHooks, fit

BATCHES = [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))]
SHORT = TrainSettings(epochs=1, lr=0.1, schedule="cosine")
BEGUN = InputDigests({"start": "a", "teacher": "b", "data": "c"})


def trained(folder, origin=None, settings=SHORT, model=None):
    more = {} if origin is None else {"origin": origin}
    return fit(model or nn.Linear(3, 2), BATCHES, settings, hooks=TrainerHooks(folder=folder, **more))


def test_the_same_or_one_that_tells_less_goes_on(tmp_path):
    trained(tmp_path, BEGUN)
    for origin in (BEGUN, InputDigests({"data": "c"}), None):
        trained(tmp_path, origin)
    assert load_checkpoint(tmp_path, "cpu")[1]["origin"] == BEGUN.digests


def test_a_checkpoint_of_a_training_without_one_is_as_it_was_before_and_taken(tmp_path):
    trained(tmp_path)
    assert set(load_checkpoint(tmp_path, "cpu")[1]) == {"settings", "model", "epochs", "scaling"}
    trained(tmp_path, BEGUN)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"start": "x"}, "another network"),
        ({"teacher": "x"}, "another teacher"),
        ({"data": "x"}, "other data"),
        ({"start": "x", "data": "x"}, "another network and other data"),
    ],
)
def test_another_is_refused_and_leaves_the_network_alone(tmp_path, changes, words):
    trained(tmp_path, BEGUN)
    model, advice = nn.Linear(3, 2), "do something else"
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RunError) as caught:
        trained(tmp_path, InputDigests({**BEGUN.digests, **changes}, advice), model=model)
    assert str(caught.value) == f"the training in {tmp_path} began with {words}; {advice}"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_its_advice_goes_with_other_settings_and_networks_too(tmp_path):
    trained(tmp_path, BEGUN)
    advised = InputDigests(BEGUN.digests, "do something else")
    with pytest.raises(RunError, match=r"other settings: lr is 0\.2 and was 0\.1; do something else$"):
        trained(tmp_path, advised, TrainSettings(epochs=1, lr=0.2, schedule="cosine"))
    with pytest.raises(RunError, match=r"of another network: .*; do something else$"):
        trained(tmp_path, advised, model=nn.Linear(3, 4))
    with pytest.raises(RunError, match=r"; resume with the same, or train in another folder$"):
        trained(tmp_path, None, TrainSettings(epochs=1, lr=0.2, schedule="cosine"))
