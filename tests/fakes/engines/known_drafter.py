"""A drafter that knows the future output, with a configurable number of wrong drafts."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Wrong = Callable[[int, int], bool]
"""Function that returns whether the draft for an output index, at a position in its run, must be wrong."""


class KnownDrafter:
    """Drafter that knows the outputs. ``outputs``: outputs by prompt. ``wrong``: see ``Wrong``."""

    name = "known"
    specs: Mapping[str, Any] = {}
    caches: dict = {}
    weight_bytes = 0

    def __init__(self, outputs: Mapping[tuple[int, ...], list[int]], wrong: Wrong, vocab_size: int) -> None:
        self._outputs = outputs
        self._wrong = wrong
        self._vocab_size = vocab_size
        self.living: set[str] = set()
        self.proposed = 0
        self.fails_at: int | None = None

    def allocate(self, config: Any) -> None:
        pass

    def release(self) -> None:
        pass

    def begin(self, request: Any) -> None:
        assert request.request_id not in self.living
        self.living.add(request.request_id)

    def end(self, request_id: str, token_ids: Any, *, num_prompt_tokens: int) -> None:
        assert len(token_ids) >= num_prompt_tokens
        self.living.remove(request_id)

    def propose(self, step: Any) -> list[list[int]]:
        self.proposed += 1
        if self.proposed == self.fails_at:
            raise RuntimeError("the drafter has had enough")
        return [self._draft(request) for request in step.requests]

    def _draft(self, request: Any) -> list[int]:
        prompt = tuple(request.token_ids[: request.num_prompt_tokens].tolist())
        known = request.token_ids[request.num_prompt_tokens :]
        output = self._outputs[prompt]
        if known.tolist() != output[: len(known)]:
            # The request has ended, but the batch does not know it yet and may contain later tokens.
            assert len(known) > len(output), "the batch holds other tokens than were put out"
            return []
        first = len(known)
        drafts = output[first : first + request.num_drafts]
        drafts += [1] * (request.num_drafts - len(drafts))
        return [
            (token + 1) % self._vocab_size if self._wrong(first + place, place) else token
            for place, token in enumerate(drafts)
        ]

    def to(self, device: Any) -> None:
        pass


KINDS: dict[str, Wrong] = {
    "right": lambda index, place: False,
    "wrong": lambda index, place: True,
    "right up to 1": lambda index, place: place >= 1,
    "right up to 3": lambda index, place: place >= 3,
    "by chance": lambda index, place: bool(np.random.default_rng(index).integers(3) == 0),
}
