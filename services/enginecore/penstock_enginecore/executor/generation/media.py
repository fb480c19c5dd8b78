"""Media of requests: the embeddings that vision and audio encoders compute, and the positions of these embeddings in
prompts and in the flat batch of a step.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from penstock_common.types.media import EMBEDS, MultiModalFeature, TensorData
from penstock_enginecore.attention.base import AttentionMetadata, IntArray
from penstock_enginecore.core.request import joined_runs
from penstock_enginecore.core.scheduler.output import EncoderStart, NewRequestData, SchedulerOutput
from penstock_enginecore.executor.generation.prompt_embeds import PromptVectors, StepVectors, embed_positions
from penstock_enginecore.executor.generation.step_inputs import StepInputs
from penstock_enginecore.forward.base import ForwardBatch, ForwardPass, to_device
from penstock_enginecore.models.multimodal.base import EncodedItem, EncoderItem, MediaEncoder, RopePositions

# Embeddings of media items. The worker keeps computed embeddings until the engine tells the worker to drop them.

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


class EncoderRows:
    """Embeddings of media items by identifier of the item: ``[num_embeds, width]`` on ``device``, with dtype ``dtype``.

    The engine decides when items are computed and dropped. A failed item gets rows of zeros, so that the step can
    continue.
    """

    def __init__(self, encoder: MediaEncoder, dtype: torch.dtype, device: torch.device) -> None:
        self._encoder = encoder
        self._dtype = dtype
        self._device = device
        self._rows: dict[str, torch.Tensor] = {}
        self._expected: dict[str, int] = {}  # number of embeddings of each item that is being encoded

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the cached embeddings."""
        return sum(rows.nbytes for rows in self._rows.values())

    def update(self, step: SchedulerOutput) -> dict[str, str]:
        """Drop, queue and encode the media items that the scheduler names for a step. Returns the failure reason of
        each failed item, by identifier.
        """
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
        """Return the embeddings of an item. Raises RuntimeError if the embeddings do not exist, which means that the
        scheduler has an error.
        """
        rows = self._rows.get(identifier)
        if rows is None:
            raise RuntimeError(
                f"the embeddings of media item {identifier} do not exist, but tokens of this step need these embeddings"
            )
        return rows

    def profile(self, run: Callable[[], None]) -> None:
        """Encode the largest possible item of each modality, and call ``run`` while each item is partly encoded.

        Raises RuntimeError if encoding fails.
        """
        for info in self._encoder.media:
            item = self._encoder.largest(info.modality)
            self._encoder.start(item)
            done = self._encoder.advance(1)
            run()
            while self._encoder.has_work:
                done += self._encoder.advance(item.num_embeds * info.num_blocks)
            if failures := [each.failure for each in done if each.rows is None]:
                raise RuntimeError(
                    f"the model cannot encode the largest {info.modality} that it accepts: {failures[0]}"
                )

    def forget_all(self) -> None:
        """Drop all embeddings, and all items that are being encoded."""
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
        """Return the embeddings of a media item whose embeddings the request contains. Raises ValueError if the dtype
        or shape of the embeddings is wrong.
        """
        expected = (num_embeds, self._encoder.width)
        shape = tensor.shape[1:] if tensor.shape[:1] == (1,) and len(tensor.shape) == 3 else tensor.shape
        if tensor.dtype not in _DTYPES or shape != expected:
            told = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"tensor {EMBEDS!r} is {told}, but the prompt needs floats of shape {list(expected)}")
        rows = torch.frombuffer(bytearray(tensor.data), dtype=_DTYPES[tensor.dtype]).view(expected)
        return rows.to(device=self._device, dtype=self._dtype)

    def _finish(self, item: EncodedItem, failures: dict[str, str]) -> None:
        expected = (self._expected.get(item.identifier, 0), self._encoder.width)
        if item.rows is None:
            self._fail(item.identifier, item.failure or "the model returned no embeddings", failures)
        elif item.rows.shape != expected:
            gave, wants = list(item.rows.shape), list(expected)
            self._fail(item.identifier, f"the model returned shape {gave}, the prompt needs {wants}", failures)
        else:
            self._rows[item.identifier] = item.rows.to(self._dtype)
            self._expected.pop(item.identifier, None)

    def _fail(self, identifier: str, failure: str, failures: dict[str, str]) -> None:
        logger.warning("could not encode a media item identifier=%s reason=%s", identifier, failure)
        failures[identifier] = failure
        shape = self._expected.pop(identifier, 0), self._encoder.width
        self._rows[identifier] = torch.zeros(shape, dtype=self._dtype, device=self._device)

    def _forget(self, identifier: str) -> None:
        self._rows.pop(identifier, None)
        if self._expected.pop(identifier, None) is not None:
            self._encoder.drop(identifier)


def row_bytes(encoder: MediaEncoder | None, dtype: torch.dtype) -> int:
    """Return the size in bytes of one media embedding, or 0 for a model without vision or audio encoders."""
    return 0 if encoder is None else encoder.width * dtype.itemsize


# Positions of media embeddings in prompts, and in the flat batch of a step.


class Placed(NamedTuple):
    """Requests and positions of the tokens in the flat batch of a step.

    Attributes:
        request_ids: IDs of the step's requests, in the order of the flat batch.
        query_start_loc: Index of the first token of each request, and the number of tokens: int64 ``[requests + 1]``.
        positions: Positions of the tokens in their requests: int64 ``[tokens]``.
    """

    request_ids: Sequence[str]
    query_start_loc: IntArray
    positions: IntArray

    def chunks(self) -> Iterator[tuple[str, int, int, int]]:
        """Iterate over the requests of the step. Yields one tuple for each request.

        A tuple has the request ID, and the index of the request's first token in the flat batch. The tuple also has the
        first and the end position that the step computes.
        """
        starts = self.query_start_loc[:-1]
        firsts = self.positions[starts]
        ends = firsts + np.diff(self.query_start_loc)
        return zip(self.request_ids, starts.tolist(), firsts.tolist(), ends.tolist(), strict=True)


class ItemRows(NamedTuple):
    """Embeddings ``start`` to ``end`` of a media item, and their indices in the flat batch, int64 ``[end - start]``."""

    identifier: str
    start: int
    end: int
    indices: IntArray


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Media of one prompt.

    Attributes:
        positions: int64 ``[embeddings]``, the positions of the embeddings of all items.
        bounds: Item i has the embeddings from index ``bounds[i]`` to before index ``bounds[i + 1]``.
        ends: For each embedding, the end of the positions to which the embedding attends. With bidirectional attention,
            this is the end of the run of adjacent embeddings. None if all attention is causal.
    """

    identifiers: Sequence[str]
    positions: IntArray
    bounds: IntArray
    ends: IntArray | None
    rope: RopePositions | None
    behind: int
    """Position after the last embedding of the prompt."""

    def rows(self, start: int, first: int, end: int) -> Iterator[ItemRows]:
        """Yield the embeddings at positions ``first`` to ``end``. In the flat batch, position ``first`` has the index
        ``start``.
        """
        low, high = np.searchsorted(self.positions, (first, end)).tolist()
        if low == high:
            return
        indices = self.positions[low:high] + (start - first)
        first_item, last_item = (np.searchsorted(self.bounds, (low, high - 1), side="right") - 1).tolist()
        for item in range(first_item, last_item + 1):
            base, behind = self.bounds[item : item + 2].tolist()
            lower, upper = max(base, low), min(behind, high)
            if lower < upper:
                yield ItemRows(self.identifiers[item], lower - base, upper - base, indices[lower - low : upper - low])


class MediaPrompts:
    """Media of prompts, by request ID. Requests with only text have no entry."""

    def __init__(self, encoder: MediaEncoder) -> None:
        self._encoder = encoder
        self._both_ways = frozenset(info.modality for info in encoder.media if info.attends_both_ways)
        self._prompts: dict[str, _Prompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def clear(self) -> None:
        """Forget every request."""
        self._prompts.clear()

    def update(self, step: SchedulerOutput) -> dict[str, str]:
        """Remove requests that have ended, and add new requests.

        Returns the failure reason of each item that does not fit its positions in the prompt, by identifier.
        """
        if self._prompts:
            for request_id in (*step.finished_request_ids, *step.preempted_request_ids):
                self._prompts.pop(request_id, None)
        failures: dict[str, str] = {}
        for new in step.new_requests:
            if new.mm_features:
                rope = self._rope(new, failures)
                self._prompts[new.request_id] = self._read(new, rope)
        return failures

    def rows(self, placed: Placed) -> list[ItemRows]:
        """Return which media embeddings are inputs of a step, and where."""
        return [rows for prompt, *chunk in self._with_embeds(placed) for rows in prompt.rows(*chunk)]

    def rope_positions(self, placed: Placed) -> IntArray | None:
        """Return the rotary positions of a step, int64 ``[3, tokens]``, or None.

        The result is None if the model's rotary embedding has no sections, or if no request of the step has media.
        """
        if self._encoder.rope_positions is None:
            return None
        deltas, within = [], []
        for request_id, start, first, end in placed.chunks():
            rope = None if (prompt := self._prompts.get(request_id)) is None else prompt.rope
            deltas.append(0 if rope is None else rope.delta)
            if rope is not None and first < rope.positions.shape[1]:
                within.append((rope.positions[:, first:end], start))
        if not within and not any(request_id in self._prompts for request_id in placed.request_ids):
            return None
        behind = placed.positions + np.repeat(deltas, np.diff(placed.query_start_loc))
        whole: IntArray = np.tile(behind, (3, 1))
        for of_prompt, start in within:
            whole[:, start : start + of_prompt.shape[1]] = of_prompt
        return whole

    def key_ends(self, placed: Placed) -> IntArray | None:
        """Return the end of the positions to which each token attends, int64 ``[tokens]``, or None if no embedding of
        the step attends to later embeddings.

        Raises RuntimeError if the step does not contain all embeddings that attend to each other.
        """
        whole: IntArray | None = None
        for prompt, start, first, end in self._with_embeds(placed) if self._both_ways else ():
            if prompt.ends is None:
                continue
            low, high = np.searchsorted(prompt.positions, (first, end)).tolist()
            if low == high:
                continue
            if whole is None:
                whole = placed.positions + 1
            ends = whole[start : start + end - first]
            ends[prompt.positions[low:high] - first] = prompt.ends[low:high]
            if ends.max() > end:
                raise RuntimeError(
                    f"a step ends at position {end} of a prompt, inside a group of embeddings that attend to each other "
                    f"and must be in one step; the group's embeddings end at position {ends.max()}"
                )
        return whole

    def _with_embeds(self, placed: Placed) -> Iterator[tuple[_Prompt, int, int, int]]:
        """Yield the requests whose tokens in this step may include media. The tuples are as in ``Placed.chunks``, with
        the prompt's media instead of the request ID.
        """
        for request_id, start, first, end in placed.chunks():
            prompt = self._prompts.get(request_id)
            if prompt is not None and first < prompt.behind:
                yield prompt, start, first, end

    def _rope(self, new: NewRequestData, failures: dict[str, str]) -> RopePositions | None:
        """Return the rotary positions of a prompt with media, or None if the model's rotary embedding has no sections.

        If the media items do not fit the prompt, store the reason in ``failures`` and return None.
        """
        if (rope_index := self._encoder.rope_positions) is None:
            return None
        try:
            return rope_index(new.token_ids[: new.num_prompt_tokens], new.mm_features)
        except ValueError as e:
            failures |= {feature.identifier: str(e) for feature in new.mm_features}
            return None

    def _read(self, new: NewRequestData, rope: RopePositions | None) -> _Prompt:
        positions = [embed_positions(feature) for feature in new.mm_features]
        both_ways = [feature.modality in self._both_ways for feature in new.mm_features]
        ends = None
        if any(both_ways):
            each = zip(new.mm_features, positions, both_ways, strict=True)
            ends = np.concatenate([_ends(feature) if both else own + 1 for feature, own, both in each])
        return _Prompt(
            identifiers=[feature.identifier for feature in new.mm_features],
            positions=np.concatenate(positions),
            bounds=np.cumsum([0, *map(len, positions)]),
            ends=ends,
            rope=rope,
            behind=int(positions[-1][-1]) + 1,
        )


def _ends(feature: MultiModalFeature) -> IntArray:
    """Return the end of the positions to which each embedding of a media item attends, int64 ``[num_embeds]``.

    A run is a range of consecutive embeddings. Adjacent runs of one item form a group, in which all embeddings attend
    to each other. Adjacent equal values of transformers' token_type_ids form groups in the same way. Tokens between two
    runs belong to no group.
    """
    spans = np.array(joined_runs(feature), dtype=np.int64)
    return np.repeat(spans[:, 1], spans[:, 1] - spans[:, 0])


class StepMedia:
    """Media of a step, for a model with vision or audio encoders. If no request has media, callers need to call only
    ``update``.
    """

    def __init__(self, encoder: MediaEncoder, dtype: torch.dtype, device: torch.device) -> None:
        self.cached = EncoderRows(encoder, dtype, device)
        self._device = device
        self._num_deepstack = encoder.num_deepstack
        self._windowed_ends = encoder.windowed_spans
        self._prompts = MediaPrompts(encoder)

    def __len__(self) -> int:
        """Return the number of requests with media."""
        return len(self._prompts)

    def update(self, step: SchedulerOutput) -> dict[str, str]:
        """Update the requests of a step, and compute the media embeddings that the step needs. Returns the failure
        reason of each failed item, by identifier.
        """
        return self._prompts.update(step) | self.cached.update(step)

    def are_in(self, placed: Placed) -> bool:
        """Return whether some input tokens of a step are media embeddings."""
        return bool(self._prompts.rows(placed))

    def vectors(self, placed: Placed) -> StepVectors | None:
        """Return the media embeddings among the input tokens of a step, or None if there are none."""
        found = self._prompts.rows(placed)
        if not found:
            return None
        indices = to_device(np.concatenate([each.indices for each in found]), self._device)
        rows = torch.cat([self.cached.of(each.identifier)[each.start : each.end] for each in found])
        if not self._num_deepstack:
            return StepVectors(indices, rows)
        embeddings, *deeper = rows.chunk(1 + self._num_deepstack, dim=1)
        return StepVectors(indices, embeddings, torch.stack(deeper))

    def rope_positions(self, placed: Placed) -> IntArray | None:
        """Return the rotary positions of a step for ``ForwardBatch.rope_positions``. Returns None if no request of the
        step has media, or if the model's rotary embedding has no sections.
        """
        return self._prompts.rope_positions(placed)

    def attention(self, placed: Placed, attention: Sequence[AttentionMetadata]) -> Sequence[AttentionMetadata]:
        """Return the attention metadata of the step, with ``key_ends`` if embeddings of the step attend to later
        positions.
        """
        ends = self._prompts.key_ends(placed)
        if ends is None:
            return attention
        return [replace(each, key_ends=ends, windowed_ends=self._windowed_ends) for each in attention]

    def forget(self) -> None:
        """Forget every request, and drop all media embeddings."""
        self._prompts.clear()
        self.cached.forget_all()


# Embeddings that a step uses in place of token embeddings: prompt embeddings that requests contain, and embeddings of
# media.


class StepEmbeddings:
    """Prompt embeddings and media embeddings of the requests in a worker's batch. ``encoder`` is None for a model
    without vision or audio encoders.
    """

    def __init__(self, encoder: MediaEncoder | None, dtype: torch.dtype, device: torch.device) -> None:
        self._prompts = PromptVectors(dtype, device)
        self._media = None if encoder is None else StepMedia(encoder, dtype, device)
        self._failures: dict[str, str] = {}

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the cached media embeddings."""
        return 0 if self._media is None else self._media.cached.num_bytes

    def update(self, step: SchedulerOutput) -> None:
        """Update the requests of a step, and compute the media embeddings that the step's forward pass needs."""
        self._prompts.update(step)
        if self._media is not None:
            self._failures.update(self._media.update(step))

    def take_failures(self) -> dict[str, str]:
        """Return the media items that have failed since the last call of this method: the failure reason by identifier."""
        failures, self._failures = self._failures, {}
        return failures

    def are_in(self, inputs: StepInputs) -> bool:
        """Return whether some input tokens of a step are prompt embeddings or media embeddings."""
        if self._media and self._media.are_in(_placed(inputs)):
            return True
        return self._prompts.of(inputs) is not None

    def into(self, batch: ForwardBatch, inputs: StepInputs, forward: ForwardPass) -> ForwardBatch:
        """Return the batch of a step with its prompt embeddings and media embeddings added. A batch without such
        embeddings is returned unchanged.
        """
        found = [] if (of_prompts := self._prompts.of(inputs)) is None else [of_prompts]
        if self._media:
            placed = _placed(inputs)
            attention = self._media.attention(placed, batch.attention)
            batch = replace(batch, attention=attention, rope_positions=self._media.rope_positions(placed))
            if (of_media := self._media.vectors(placed)) is not None:
                found.append(of_media)
        if not found:
            return batch
        embedded = forward.embed(batch.token_ids)
        deepstack: torch.Tensor | None = None
        for each in found:
            embedded, deeper = each.into(embedded)
            deepstack = deepstack if deeper is None else deeper
        replaced = torch.cat([each.indices for each in found])
        return replace(batch, embedded=embedded, deepstack=deepstack, replaced=replaced)

    def profile(self, run: Callable[[], None]) -> None:
        """Call ``run``, so that the caller can measure the peak memory. For a model with vision or audio encoders, call
        ``run`` while the largest items are being encoded.
        """
        if self._media is None:
            run()
        else:
            self._media.cached.profile(run)

    def forget(self) -> None:
        """Forget every request, and drop all media embeddings."""
        self._prompts.clear()
        self._failures.clear()
        if self._media is not None:
            self._media.forget()


def _placed(inputs: StepInputs) -> Placed:
    return Placed(inputs.request_ids, inputs.attention[0].query_start_loc, inputs.positions)
