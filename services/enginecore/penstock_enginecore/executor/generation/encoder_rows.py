"""Embeddings of media, kept by the worker from when they are computed until the engine has them forgotten."""

import logging
from collections.abc import Callable

import torch

from penstock_common.types.media import EMBEDS, TensorData
from penstock_enginecore.core.scheduler.output import EncoderStart, SchedulerOutput
from penstock_enginecore.models.multimodal.base import EncodedItem, EncoderItem, MediaEncoder

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


class EncoderRows:
    """Of ``encoder``, by identifier: ``[num_embeds, width]`` on ``device``, as ``dtype``. The engine says what is computed when,
    and what is forgotten; an item that fails has rows of zeros, so that the step goes on.
    """

    def __init__(self, encoder: MediaEncoder, dtype: torch.dtype, device: torch.device) -> None:
        self._encoder = encoder
        self._dtype = dtype
        self._device = device
        self._rows: dict[str, torch.Tensor] = {}
        self._expected: dict[str, int] = {}  # rows of the items that are to be encoded

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_bytes(self) -> int:
        """Of the rows that are kept."""
        return sum(rows.nbytes for rows in self._rows.values())

    def update(self, step: SchedulerOutput) -> dict[str, str]:
        """Forget, queue and compute what the step says. By identifier, why items could not be encoded."""
        for identifier in step.freed_identifiers:
            self._forget(identifier)
        failures: dict[str, str] = {}
        for start in step.encoder_starts:
            self._expected[start.identifier] = start.num_embeds
            try:
                self._start(start)
            except Exception as e:
                self._fail(start.identifier, f"{type(e).__name__}: {e}", failures)
        if step.encoder_budget and self._encoder.has_work:
            for item in self._encoder.advance(step.encoder_budget):
                self._finish(item, failures)
        return failures

    def of(self, identifier: str) -> torch.Tensor:
        """The rows of an item. RuntimeError where they are not there: the engine has scheduled what it could not."""
        rows = self._rows.get(identifier)
        if rows is None:
            raise RuntimeError(
                f"the embeddings of {identifier} are not there, and tokens were scheduled that need them"
            )
        return rows

    def profile(self, run: Callable[[], None]) -> None:
        """Encode the largest item of each modality, with ``run`` between two of its slices. RuntimeError where that fails."""
        for info in self._encoder.media:
            item = self._encoder.largest(info.modality)
            self._encoder.start(item)
            done = self._encoder.advance(1)
            run()
            while self._encoder.has_work:
                done += self._encoder.advance(item.num_embeds * info.num_blocks)
            if failures := [each.failure for each in done if each.rows is None]:
                raise RuntimeError(f"the largest {info.modality} cannot be encoded: {failures[0]}")

    def forget_all(self) -> None:
        """Rows, and what is to be encoded."""
        for identifier in [*self._expected, *self._rows]:
            self._forget(identifier)

    def _start(self, start: EncoderStart) -> None:
        identifier, num_embeds = start.identifier, start.num_embeds
        if EMBEDS in start.data:
            self._rows[identifier] = self._taken(start.data[EMBEDS], num_embeds)
            del self._expected[identifier]
        else:
            item = EncoderItem(identifier, start.modality, num_embeds, start.data)
            self._encoder.start(item)

    def _taken(self, tensor: TensorData, num_embeds: int) -> torch.Tensor:
        """Rows that came with the request, there at once. Raises ValueError for others than the model's."""
        expected = (num_embeds, self._encoder.width)
        shape = tensor.shape[1:] if tensor.shape[:1] == (1,) and len(tensor.shape) == 3 else tensor.shape
        if tensor.dtype not in _DTYPES or shape != expected:
            told = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{EMBEDS!r} is {told}; the prompt has place for {list(expected)}, floats")
        rows = torch.frombuffer(bytearray(tensor.data), dtype=_DTYPES[tensor.dtype]).view(expected)
        return rows.to(device=self._device, dtype=self._dtype)

    def _finish(self, item: EncodedItem, failures: dict[str, str]) -> None:
        expected = (self._expected.get(item.identifier, 0), self._encoder.width)
        if item.rows is None:
            self._fail(item.identifier, item.failure or "the model gave no embeddings", failures)
        elif item.rows.shape != expected:
            gave, wants = list(item.rows.shape), list(expected)
            self._fail(item.identifier, f"the model gave embeddings {gave} where the prompt has {wants}", failures)
        else:
            self._rows[item.identifier] = item.rows.to(self._dtype)
            self._expected.pop(item.identifier, None)

    def _fail(self, identifier: str, failure: str, failures: dict[str, str]) -> None:
        logger.warning("media %s could not be encoded: %s", identifier, failure)
        failures[identifier] = failure
        shape = self._expected.pop(identifier, 0), self._encoder.width
        self._rows[identifier] = torch.zeros(shape, dtype=self._dtype, device=self._device)

    def _forget(self, identifier: str) -> None:
        self._rows.pop(identifier, None)
        if self._expected.pop(identifier, None) is not None:
            self._encoder.drop(identifier)


def row_bytes(encoder: MediaEncoder | None, dtype: torch.dtype) -> int:
    """Of a row; 0 for a model without towers."""
    return 0 if encoder is None else encoder.width * dtype.itemsize
