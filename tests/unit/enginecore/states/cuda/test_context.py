"""Calls that the kernels of recurrent layers do not support run on torch, or refuse to be captured."""

import logging
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from penstock_enginecore.states.base import ConvCall, ScanCall
from penstock_enginecore.states.core.spec import SPAN
from penstock_enginecore.states.cuda import context
from penstock_enginecore.states.cuda.context import TritonStates, unknown_scan
from penstock_enginecore.states.cuda.indices import StateIndices
from tests.unit.enginecore.states.test_rows import DEVICE, MIXER, Sequences, conv_call, part_of, scan_call, torch_form

TOKENS = 20


class NoKernels:
    """Kernels that must not be launched."""

    def convolve(self, *args: Any, **options: Any) -> None:
        raise AssertionError("launched a convolution")

    def scan(self, *args: Any) -> None:
        raise AssertionError("launched a scan")


@dataclass(frozen=True, slots=True)
class WiderCall(ScanCall):
    """A scan with an input that the kernels do not know."""

    gate: torch.Tensor | None = None


def states(sequences: Sequences, *, known: bool) -> TritonStates:
    step = sequences.metadata([(0, 0, TOKENS)])
    indices = StateIndices.of(step, TOKENS, DEVICE)
    return TritonStates(NoKernels(), {MIXER: sequences.layer}, indices, step if known else None, DEVICE)


def wide(call: ScanCall) -> WiderCall:
    return WiderCall(call.mixer, call.query, call.key, call.value, call.decay, call.beta, gate=call.decay)


def test_unknown_calls_run_on_torch_and_the_log_has_the_reason_once(caplog: pytest.LogCaptureFixture) -> None:
    context._log_once.cache_clear()
    conv, scan = replace(conv_call(TOKENS), activation="gelu"), scan_call(TOKENS, corrects=True)
    sequences, other = Sequences(torch_form, 1, SPAN), Sequences(torch_form, 1, SPAN)
    step, expected = states(sequences, known=True), other.step([(0, 0, TOKENS)])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(step.convolve(conv), expected.convolve(conv))
        assert torch.equal(step.scan(wide(scan)), expected.scan(scan))
    assert [record.getMessage() for record in caplog.records] == [
        "computing some operations of recurrent layers with PyTorch instead of the state kernels (slower) "
        "reason=the state kernels do not compute the activation 'gelu'",
        "computing some operations of recurrent layers with PyTorch instead of the state kernels (slower) "
        "reason=the state kernels do not know the input 'gate' of recurrent layers",
    ]
    for tensor, same in zip(sequences.layer.tensors(), other.layer.tensors(), strict=True):
        assert torch.equal(tensor.nan_to_num(7e8), same.nan_to_num(7e8))


def test_unknown_calls_cannot_be_captured() -> None:
    step = states(Sequences(torch_form, 1, SPAN), known=False)
    conv: ConvCall = replace(conv_call(TOKENS), activation="gelu")
    with pytest.raises(
        RuntimeError, match="do not compute the activation 'gelu', so the step cannot be captured as a CUDA graph"
    ):
        step.convolve(conv)
    with pytest.raises(RuntimeError, match="do not know the input 'gate' of recurrent layers, so the step cannot"):
        step.scan(wide(scan_call(TOKENS, corrects=False)))


def test_decays_per_channel_and_other_dtypes_are_unknown() -> None:
    call = part_of(scan_call(TOKENS, corrects=True), 0, 3)
    assert unknown_scan(call) == ""
    assert "decays of shape [3, 4, 8]" in unknown_scan(replace(call, decay=call.decay[..., None].expand(3, 4, 8)))
    assert "torch.float64" in unknown_scan(replace(call, value=call.value.double()))


def test_vectors_of_a_step_are_aligned() -> None:
    indices = StateIndices.of(Sequences(torch_form, 3, SPAN).metadata([(0, 0, 3), (2, 16, 1)]), 4, DEVICE)
    vectors = (
        indices.firsts,
        indices.starts,
        indices.counts,
        indices.rings,
        indices.slots,
        indices.owners,
        indices.writes,
    )
    assert {vector.data_ptr() % 16 for vector in vectors} == {0}
    assert [vector.tolist() for vector in vectors] == [[0, 3], [0, 16], [3, 1], [0, 2], [0, 6], [0, 0, 0, 1], [-1] * 4]
    assert not indices.decodes
