"""Calls on fake tensors while a network is traced."""

from cases import CASES
from torch._subclasses.fake_tensor import FakeTensorMode

import ifso


def test_calls_with_weights_are_remembered_from_trace_to_trace():
    case = CASES["residual"]
    ifso.trace(case.model(), case.inputs())
    before = FakeTensorMode.cache_info()
    ifso.trace(case.model(), case.inputs())
    after = FakeTensorMode.cache_info()
    assert after.misses == before.misses
    assert after.hits > before.hits
    unknown = after.bypasses["non-fake tensor"] - before.bypasses.get("non-fake tensor", 0)
    assert unknown == 1, "but for the weight of the linear layer, which is transposed alone"
