"""Element by element: ids at the same place are the same channel."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from ifso.common.tensors import placed
from ifso.graph.channel_ids import FROM_INPUT, Labels
from ifso.graph.rules import hold, rule
from ifso.graph.tape import Call, Ref


@rule(
    "aten.copy_", "aten.native_dropout", "aten.dropout", "aten.alpha_dropout", "aten.hardswish", "aten.glu_jvp",
    "aten.log_sigmoid_forward", "aten.rrelu_with_noise", "aten.floor_divide", "aten.special_expit", "aten.polar",
    "aten.complex",
)  # fmt: skip
def pointwise(call: Call, labels: Labels) -> None:
    """Unite the ids of all operands where they meet; an axis that meets one without ids is frozen.

    Besides these operators, of all that PyTorch calls pointwise.
    """
    refs = list(dict.fromkeys(call.inputs))
    outputs = [ref for ref in call.outputs if ref is not None]
    if not outputs:
        return
    shape = labels.shape(outputs[0])
    layers = labels.merge(layer for ref in refs for layer in labels.aligned(ref, len(shape)))
    for layer, ref in product(layers, refs):
        if labels.rigid_dim(layer, ref, len(shape)) is not None:
            labels.freeze(layer.ids, f"is combined element by element with {labels.why(ref)}")
    written = next((ref for ref in refs if ref in outputs), None)
    if written is not None and layers and not labels[written] and _shares_memory(written, labels):
        for layer in layers:
            labels.freeze(layer.ids, "is written in place into a part of another tensor")
    like = next((ref for ref in refs if labels.why(ref) == FROM_INPUT), refs[0] if refs else None)
    for ref in outputs:
        labels.set(ref, layers, like=like)
    if written is not None and like is not None:
        _pass_on_why(written, like, labels)
    for ref in refs:
        if ref not in outputs:
            labels.adopt(ref, layers)
    labels.pass_flexible(refs, outputs)
    alike = all(ref.index in labels.uniform or not labels.tape.shape(ref) for ref in refs)
    (labels.uniform.update if alike else labels.uniform.difference_update)(ref.index for ref in outputs)


def _pass_on_why(written: Ref, source: Ref, labels: Labels) -> None:
    """A tensor written in place, and the one it is a part of, now hold what was written."""
    for index in {written.index, labels.views.get(written.index, written.index)} - {source.index}:
        labels.set_why(Ref(index), labels.why(source))


def _shares_memory(ref: Ref, labels: Labels) -> bool:
    return ref.index in labels.views or ref.index in labels.views.values()


@rule(
    "aten.zeros", "aten.ones", "aten.full", "aten.empty", "aten.new_zeros", "aten.new_ones", "aten.new_full",
    "aten.new_empty", "aten.rand", "aten.randn", "aten.scalar_tensor", "aten.zeros_like", "aten.ones_like",
    "aten.full_like", "aten.empty_like", "aten.rand_like", "aten.randn_like", "aten.fill", "aten.zero_",
    "aten.bernoulli", "aten.uniform_", "aten.normal_", "aten.empty_strided",
    "aten.new_empty_strided",
)  # fmt: skip
def uniform(call: Call, labels: Labels) -> None:
    """A tensor whose elements are all alike: its size follows whatever it meets."""
    for ref in call.outputs:
        if ref is not None:
            inputs = tuple(call.inputs)
            existing = labels[ref] if ref in inputs else ()
            labels.set(ref, labels[inputs[0]] if call.op.endswith("_like") and inputs else existing)
            labels.uniform.add(ref.index)
            labels.set_why(ref, "a constant made in forward")


@rule(
    "aten.mse_loss", "aten.smooth_l1_loss", "aten.huber_loss", "aten.binary_cross_entropy", "aten.nll_loss_forward",
    "aten.nll_loss2d_forward", "aten.binary_cross_entropy_with_logits", "aten.cross_entropy_loss", "aten.nll_loss",
)  # fmt: skip
def loss(call: Call, labels: Labels) -> None:
    """Predictions meet targets: they must stay."""
    hold(call, labels, "is compared with targets by a loss")


@rule("aten.arange", "aten.linspace", "aten.eye", "aten.tril_indices", "aten.triu_indices", "aten.lift_fresh",
      "aten.randperm", "aten.randint")  # fmt: skip
def constant(call: Call, labels: Labels) -> None:
    """A constant of fixed size made in forward."""
    for ref in call.outputs:
        labels.set(ref, ())
        labels.set_why(ref, "a constant made in forward")


@rule("aten.prelu", "aten._prelu_kernel")
def prelu(call: Call, labels: Labels) -> None:
    """One slope per channel (dim 1), or one for all."""
    x, weight = call.args[:2]
    layers = list(labels[x])
    if labels[weight] and len(labels.shape(weight)) == 1:
        follow(labels, x, weight, 1)
    elif labels[weight]:
        layers = labels.merge([*layers, *labels.aligned(weight, len(labels.shape(x)))])
    labels.set(call.outputs[0], layers, like=x)


def follow(labels: Labels, x: Ref, parameter: Ref | None, dim: int) -> None:
    """A one-dimensional parameter that goes along with dim ``dim`` of ``x``."""
    if parameter is None or not labels[parameter]:
        return
    own = labels[parameter][0]
    layer = labels.along(x, dim)
    if layer is None:
        labels.freeze(own.ids, f"goes along with {labels.why(x)}")
        return
    labels.unite_layers(layer, replace(own, ids=placed(own.ids, dim, layer.ids.dim())))


@rule("aten.cumsum", "aten.cumprod", "aten.sort", "aten.topk", "aten.argsort", "aten.logcumsumexp", "aten.kthvalue",
      "aten.median", "aten.mode")  # fmt: skip
def ordered(call: Call, labels: Labels) -> None:
    """Order along one dim: channels along it must stay, others pass."""
    x = call.args[0]
    dim_at = {"aten.topk": 2, "aten.kthvalue": 2}.get(call.op, 1)
    dim = call.argument(dim_at, "dim", -1)
    dim = dim if isinstance(dim, int) and not isinstance(dim, bool) else -1
    ndim = max(len(labels.shape(x)), 1)
    passing = labels.passing(x, [dim % ndim], f"its order matters in {call.op}")
    for ref in call.outputs:
        labels.set(ref, passing if ref and len(labels.shape(ref)) == ndim else (), like=x)
