"""Kernels of recurrent layers whose launches a recorder sees."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from penstock_enginecore.states.cuda.context import StateKernels
from penstock_enginecore.states.cuda.indices import StateIndices
from penstock_enginecore.states.memory import StateLayer
from tests.fakes.models.recorded_launches import RecordedKernels, tensors_of


class RecordedStates:
    """Launches ``states``. The recorder of ``kernels``, if any, sees each launch as one operation."""

    def __init__(self, kernels: RecordedKernels, states: StateKernels) -> None:
        self._kernels = kernels
        self._states = states

    def convolve(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        layer: StateLayer,
        indices: StateIndices,
        *,
        activated: bool,
    ) -> None:
        run = functools.partial(self._states.convolve, inputs, weight, bias, out, layer, indices, activated=activated)
        self._launch("convolve", run, [out, layer.tails, layer.inputs, indices.broken], [inputs, weight, bias, indices])

    def scan(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None,
        out: torch.Tensor,
        layer: StateLayer,
        indices: StateIndices,
    ) -> None:
        run = functools.partial(self._states.scan, query, key, value, decay, beta, out, layer, indices)
        self._launch("scan", run, [out, *layer.tensors(), indices.broken], [query, key, value, decay, beta, indices])

    def _launch(self, name: str, run: Callable[[], None], written: list[torch.Tensor], read: list[Any]) -> None:
        recorder = self._kernels.recorder
        if recorder is None:
            run()
            return
        tensors = [*written, *tensors_of([each for each in read if each is not None])]
        launch = functools.partial(lambda *_: run(), *tensors)
        recorder.launch(name, launch, tuple(range(len(written))))
