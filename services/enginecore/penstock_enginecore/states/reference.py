"""Computation of recurrent layers token by token, to check the faster implementations."""

import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from penstock_enginecore.states.base import ConvCall, ScanCall, StateMetadata


class ReferenceStates:
    """``StateContext`` for sequences that begin in the step, so that no state is read or stored.

    Raises ValueError for a sequence that began in an earlier step.
    """

    def __init__(self, step: StateMetadata) -> None:
        if any(sequence.start for sequence in step.sequences):
            raise ValueError(
                "the reference implementation of recurrent layers computes only sequences that begin in the current step"
            )
        self._parts = [slice(s.first, s.first + s.count) for s in step.sequences]

    def convolve(self, call: ConvCall) -> torch.Tensor:
        """Compute the convolution of each sequence, with zeros as the inputs before its first token."""
        before = call.weight.shape[1] - 1
        results = []
        for part in self._parts:
            inputs = functional.pad(call.inputs[part].T.to(call.weight.dtype), (before, 0))
            results.append(functional.conv1d(inputs[None], call.weight[:, None], call.bias, groups=len(inputs))[0].T)
        result = torch.cat(results)
        if call.activation is not None:
            result = ACT2FN[call.activation](result)
        return result.to(call.inputs.dtype)

    def scan(self, call: ScanCall) -> torch.Tensor:
        """Compute the recurrence of each sequence, which starts from a state of zeros."""
        outputs = []
        for part in self._parts:
            beta = None if call.beta is None else call.beta[part]
            query, key, value, decay = (each[part] for each in (call.query, call.key, call.value, call.decay))
            state = value.new_zeros(value.shape[1], key.shape[2], value.shape[2])
            outputs.append(recurrent(ScanCall(call.mixer, query, key, value, decay, beta, call.rates), state)[0])
        return torch.cat(outputs)


def recurrent(call: ScanCall, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the recurrence of one sequence token by token. ``state`` ``[heads, key size, value size]`` is the state
    before the first token.

    Returns:
        The outputs ``[tokens, heads, value size]``, and the state after the last token.
    """
    repeats = call.value.shape[1] // call.key.shape[1]
    keys, queries = (each.repeat_interleave(repeats, dim=1)[..., None] for each in (call.key, call.query))
    outputs = []
    for token in range(len(call.value)):
        decay = call.decay[token]
        if decay.dim() == 1:
            decay = decay[:, None] if call.rates is None else decay[:, None] * call.rates
        state = decay.exp()[..., None] * state
        update = call.value[token]
        if call.beta is not None:
            update = call.beta[token][:, None] * (update - (keys[token] * state).sum(1))
        state = state + keys[token] * update[:, None]
        outputs.append((queries[token] * state).sum(1))
    return torch.stack(outputs), state
