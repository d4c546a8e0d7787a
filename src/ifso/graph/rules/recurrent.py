"""Recurrent layers that run as one kernel: their channels stay, their products are counted."""

from __future__ import annotations

import math

from ifso.graph.labels import Labels
from ifso.graph.rules import rule
from ifso.graph.tape import Call


@rule("aten.mkldnn_rnn_layer", "aten._cudnn_rnn", "aten.miopen_rnn")
def recurrent_layer(call: Call, labels: Labels) -> None:
    """x [steps, batch, features] meets every weight matrix once a step; on other machines these are plain products."""
    x = call.args[0]
    labels.freeze_all(call.inputs, "runs through a recurrent layer, which is one kernel")
    for ref in call.outputs:
        labels.set(ref, (), like=x)
    values = labels.tape.values
    rows = math.prod(labels.tape.shape(x)[:-1])
    for ref in call.inputs:
        if values[ref.index].kind == "parameter" and len(values[ref.index].shape) == 2:
            outputs, inputs = values[ref.index].shape
            labels.cost("linear", call, (rows, inputs, outputs), ())
            labels.cost("activation", call, (rows, outputs), ())
