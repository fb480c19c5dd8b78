"""Where the media of requests stand in their prompts, and in the flat batch of a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock_common.types.media import EmbedRun, MultiModalFeature
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.core.scheduler.output import NewRequestData, SchedulerOutput
from penstock_enginecore.executor.generation.vector_positions import embed_positions
from penstock_enginecore.models.multimodal.base import MediaEncoder, RopePositions


class Placed(NamedTuple):
    """The tokens of a step, flat: whose they are, where those of each request begin, int64 ``[requests + 1]``, and their
    positions, int64 ``[tokens]``.
    """

    request_ids: Sequence[str]
    query_start_loc: IntArray
    positions: IntArray

    def chunks(self) -> Iterator[tuple[str, int, int, int]]:
        """Of each request: its first token in the flat batch, and the positions from which and up to which it is computed."""
        starts = self.query_start_loc[:-1]
        firsts = self.positions[starts]
        ends = firsts + np.diff(self.query_start_loc)
        return zip(self.request_ids, starts.tolist(), firsts.tolist(), ends.tolist(), strict=True)


class ItemRows(NamedTuple):
    """Rows ``start`` to ``end`` of an item, for ``indices`` int64 ``[end - start]`` of the flat batch."""

    identifier: str
    start: int
    end: int
    indices: IntArray


@dataclass(frozen=True, slots=True)
class _Prompt:
    """``positions`` int64 ``[embeddings]`` of all items; those of item i are ``bounds[i]`` to ``bounds[i + 1]``. ``ends``: where
    the run ends in which each is, for those that see what is behind them there, else its own position and one.
    """

    identifiers: Sequence[str]
    positions: IntArray
    bounds: IntArray
    ends: IntArray | None
    rope: RopePositions | None
    behind: int
    """The position behind the last embedding."""

    def rows(self, start: int, first: int, end: int) -> Iterator[ItemRows]:
        """Of the positions ``first`` to ``end``, which are in the flat batch from ``start`` on."""
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
    """By request; those that are text alone are not in it, and cost nothing."""

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
        """Forget requests that are gone, take in those that are new. By identifier, why items do not fit where they stand."""
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
        """The embeddings among the tokens of a step."""
        return [rows for prompt, *chunk in self._with_embeds(placed) for rows in prompt.rows(*chunk)]

    def rope_positions(self, placed: Placed) -> IntArray | None:
        """Int64 ``[3, tokens]`` of a step in which a request has media, of a model that asks for them; else None."""
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
        """Int64 ``[tokens]`` of a step that computes embeddings which see those behind them; else None. RuntimeError where not
        all of these are in it.
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
                    f"a step ends at position {end} of a prompt, between embeddings that see each other up to {ends.max()}"
                )
        return whole

    def _with_embeds(self, placed: Placed) -> Iterator[tuple[_Prompt, int, int, int]]:
        """Of the requests that may have embeddings among their tokens: where these are, see ``Placed.chunks``."""
        for request_id, start, first, end in placed.chunks():
            prompt = self._prompts.get(request_id)
            if prompt is not None and first < prompt.behind:
                yield prompt, start, first, end

    def _rope(self, new: NewRequestData, failures: dict[str, str]) -> RopePositions | None:
        """None for a model without sections, and for a request that ends: its items do not fit."""
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
    """The ends of the keys that a feature's embeddings see, int64 ``[num_embeds]``: neighbours of one item form a group, as
    transformers makes one of equal neighbours in token_type_ids; tokens between two runs are in none.
    """
    runs = feature.embed_runs or (EmbedRun(0, feature.length),)
    ends = [feature.offset + run.start + run.count for run in runs]
    for i in range(len(runs) - 2, -1, -1):
        if ends[i] == feature.offset + runs[i + 1].start:
            ends[i] = ends[i + 1]
    return np.repeat(np.array(ends, dtype=np.int64), [run.count for run in runs])
