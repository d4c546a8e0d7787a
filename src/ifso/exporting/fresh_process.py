"""Runs an exported program on stored inputs, in a process without ifso. Arguments: program, inputs, outputs."""

import sys

import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves, tree_unflatten


def main(program: str, inputs: str, outputs: str) -> None:
    """Inputs and outputs are named by sample and place: ``2.0`` is the first tensor of the third sample."""
    with open(program, "rb") as file:  # noqa: PTH123
        loaded = torch.export.load(file)
    module, spec = loaded.module(), loaded.call_spec.in_spec
    stored = load_file(inputs)
    results = {}
    for sample in sorted({name.partition(".")[0] for name in stored}):
        count = sum(name.startswith(f"{sample}.") for name in stored)
        args, kwargs = tree_unflatten([stored[f"{sample}.{place}"] for place in range(count)], spec)
        with torch.no_grad():
            leaves = tree_leaves(module(*args, **kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        results.update({f"{sample}.{place}": tensor.clone().contiguous() for place, tensor in enumerate(tensors)})
    save_file(results, outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
