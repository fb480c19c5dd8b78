"""Which layer of a fused decoder computes something else than the model's own."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from penstock_enginecore.forward.proof import TOLERANCES, distance

Trace = list[torch.Tensor]
"""What the first layer gets, and what each layer puts out: ``[tokens, hidden size]`` each."""


@contextmanager
def traced(layers: Sequence[torch.nn.Module]) -> Iterator[Trace]:
    """The trace of the forward pass of transformers' modules in the ``with`` block."""
    trace: Trace = []

    def before(module: torch.nn.Module, args: Any) -> None:  # noqa: ARG001 - torch's signature
        trace.append(args[0][0].clone())

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        trace.append(hidden[0].clone())

    handles = [layers[0].register_forward_pre_hook(before)]
    handles += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def first_difference(found: Trace, expected: Trace, names: Sequence[str]) -> str:
    """Words that say where ``found`` parts from ``expected``; ``names``: of the layers."""
    differences = [distance(one, other) for one, other in zip(found, expected, strict=True)]
    limit = TOLERANCES[expected[0].dtype]
    if not differences[0] <= limit:
        return f": the embedding differs by {differences[0]:.3g}"
    for name, (before, after) in zip(names, itertools.pairwise(differences), strict=True):
        if not after <= limit:
            return f": {name} puts out what differs by {after:.3g}, of what differs by {before:.3g}"
    return f": its layers agree to {max(differences):.3g}, so that its last norm or head differs"
