"""Drafts from the client's prediction, which is a guess of the output. If the prediction gives no drafts, another
drafter is used.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.attention.kv_cache import LayerCaches
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.scheduler.output import NewRequestData
from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.sample.base import SamplingInputs
from penstock_enginecore.speculation.base import Drafter, DraftRequest, DraftStep
from penstock_enginecore.speculation.ngram import TokenIndex

_WIDTH = 2
_NEAR = 8
_PLACES = 16
_LOST = 6
"""Number of consecutive output tokens without a match in the prediction after which no tokens are drafted. Drafting
continues once two consecutive tokens are found in the prediction.
"""


class Place:
    """Tracks which position in the prediction an output has reached.

    If an output token differs from the predicted token, there are three cases: the output token replaces the predicted
    token, the output token is inserted, or the output omits predicted tokens. The tracker first looks for the token
    among the next predicted tokens. If the token is not there, the tracker assumes a replacement. If two consecutive
    tokens do not match, the tracker looks up the pair in the complete prediction and prefers the nearest later
    position.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._index = TokenIndex(_WIDTH, prediction)
        self._at = 0
        self._misses = 0
        self._last = -1
        self._skipped = 0
        self.num_followed = 0

    def follow(self, tokens: Iterable[int]) -> None:
        """Update the position in the prediction with the next tokens of the output."""
        for token in tokens:
            self._take(token)
            self._last = token
            self.num_followed += 1

    def drafts(self, count: int) -> list[int]:
        """Return the next predicted tokens, at most ``count``."""
        return [] if self._misses >= _LOST else self._index.tokens[self._at : self._at + count]

    def _take(self, token: int) -> None:
        tokens, at = self._index.tokens, self._at
        if at < len(tokens) and tokens[at] == token:
            self._at, self._misses = at + 1, 0
            return
        self._misses += 1
        if self._misses == 2 and tokens[self._skipped : self._skipped + 1] == [
            token
        ]:  # The previous output token was inserted, so this output token may match at the old position.
            self._at, self._misses = self._skipped + 1, 0
            return
        self._skipped = at
        if self._misses > 1 and (found := self._find((self._last, token), at)) is not None:
            self._at, self._misses = found, 0
            return
        near = tokens[at + 1 : at + 1 + _NEAR]
        self._at = at + 2 + near.index(token) if token in near else min(at + 1, len(tokens))

    def _find(self, pair: Sequence[int], at: int) -> int | None:
        """Return the position after the nearest occurrence of the pair of tokens at or after ``at``. If there is no
        such occurrence, return the position after the last occurrence before ``at``.
        """
        places = list(self._index.ending_like(pair, _PLACES))
        behind = [place for place in places if place >= at - _LOST]
        if behind:
            return min(behind)
        return max(places) if places else None


class Predicted:
    """A ``Drafter`` that uses the client's prediction first, then ``inner`` if there is one."""

    def __init__(self, inner: Drafter | None) -> None:
        self._inner = inner
        self.name = "prediction" if inner is None else inner.name
        self.state_layers: Sequence[int] = () if inner is None else inner.state_layers
        self._places: dict[str, Place] = {}

    @property
    def specs(self) -> Mapping[str, KVCacheSpec]:
        """KV cache needs of the inner drafter's attention layers, by layer name."""
        return {} if self._inner is None else self._inner.specs

    @property
    def weight_bytes(self) -> int:
        """Size of the inner drafter's weights in bytes."""
        return 0 if self._inner is None else self._inner.weight_bytes

    @property
    def caches(self) -> LayerCaches:
        """Keys and values of the inner drafter."""
        return {} if self._inner is None else self._inner.caches

    def allocate(self, config: KVCacheConfig) -> None:
        """Pass the call to the inner drafter, if there is one."""
        if self._inner is not None:
            self._inner.allocate(config)

    def release(self) -> None:
        """Pass the call to the inner drafter, if there is one."""
        if self._inner is not None:
            self._inner.release()

    def begin(self, request: NewRequestData) -> None:
        """Add a request, with its prediction if the request has a prediction."""
        if request.prediction_token_ids:
            self._places[request.request_id] = Place(request.prediction_token_ids)
        if self._inner is not None:
            self._inner.begin(request)

    def end(self, request_id: str, token_ids: npt.NDArray[np.int32], *, num_prompt_tokens: int) -> None:
        """Delete the prediction of the request, and remove the request from the inner drafter."""
        self._places.pop(request_id, None)
        if self._inner is not None:
            self._inner.end(request_id, token_ids, num_prompt_tokens=num_prompt_tokens)

    def observe(self, step: DraftStep, first: IntArray, states: Sequence[torch.Tensor]) -> None:
        """Pass the call to the inner drafter, if there is one."""
        if self._inner is not None:
            self._inner.observe(step, first, states)

    def propose(self, step: DraftStep) -> list[list[int]]:
        """Draft tokens for each request. The inner drafter drafts only for requests that get no drafts from a
        prediction.
        """
        predicted = [self._draft(request) if request.num_drafts else [] for request in step.requests]
        if self._inner is None:
            return predicted
        asked: DraftStep = _Without(step, predicted) if any(predicted) else step
        inner = self._inner.propose(asked)
        return [mine or theirs for mine, theirs in zip(predicted, inner, strict=True)]

    def to(self, device: torch.device) -> None:
        """Pass the call to the inner drafter, if there is one."""
        if self._inner is not None:
            self._inner.to(device)

    def _draft(self, request: DraftRequest) -> list[int]:
        place = self._places.get(request.request_id)
        if place is None:
            return []
        place.follow(request.token_ids[request.num_prompt_tokens + place.num_followed :].tolist())
        return place.drafts(request.num_drafts)


class _Without(DraftStep):
    """The completed step as the inner drafter sees it: requests that already have drafts want no more drafts."""

    def __init__(self, step: DraftStep, drafts: Sequence[Sequence[int]]) -> None:
        self._step = step
        self.requests = [
            DraftRequest(each.request_id, each.token_ids, each.num_prompt_tokens, 0 if drafted else each.num_drafts)
            for each, drafted in zip(step.requests, drafts, strict=True)
        ]

    def lay_out(
        self, requests: Sequence[int], first: IntArray, tokens: Sequence[IntArray], *, ahead: int = 0
    ) -> ForwardBatch:
        """Pass the call to the completed step."""
        return self._step.lay_out(requests, first, tokens, ahead=ahead)

    def sampling(self, requests: Sequence[int], place: int | IntArray) -> SamplingInputs:
        """Pass the call to the completed step."""
        return self._step.sampling(requests, place)
