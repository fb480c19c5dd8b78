"""Drafts by a smaller model of the same vocabulary: a chain of its own next tokens (Leviathan et al., 2023)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.attention.kv_memory import num_bytes, num_groups
from penstock_enginecore.config import EngineCoreConfig, ModelConfig
from penstock_enginecore.core.executor import Progress
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.scheduler.output import NewRequestData
from penstock_enginecore.forward.build import BuiltForward, ForwardConfig, build_forward
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import LoadedModel, load_model
from penstock_enginecore.pooling.embedder import resolve_task
from penstock_enginecore.spec_decode.arms import Arms
from penstock_enginecore.spec_decode.base import DraftStep, Stateless
from penstock_enginecore.spec_decode.draft_choice import DraftChoice, num_held
from penstock_enginecore.spec_decode.draft_layers import PREFIX, draft_layers
from penstock_enginecore.spec_decode.vocabulary import check_vocabulary

_MOST_BEHIND = 512
"""Tokens that a step catches up on, at most, so that a long prompt holds nobody up: what is left comes with the next steps."""


class _Followed:
    """What the drafter has of a request: keys and values of ``computed`` tokens, and ``drafts`` that were made at ``first``."""

    def __init__(self) -> None:
        self.computed = 0
        self.first = 0
        self.drafts: list[int] = []
        self.arms = Arms()


class DraftModel(Stateless):
    """A ``Drafter``. It computes a request's tokens when it drafts for it, all that it has not seen at once: requests that get no
    drafts cost nothing. Requests that begin on cached blocks are computed from their beginning, for these may have no keys
    and values of its own.
    """

    name = "draft_model"

    def __init__(self, model: LoadedModel, built: BuiltForward, vocab_size: int, sampling: str) -> None:
        """``vocab_size``: of the model that verifies. ``sampling``: ``speculative.draft_sampling``."""
        self._model = model
        self._forward = built.forward
        self._sampler = built.sampler
        self._vocab_size = min(vocab_size, model.vocab_size)
        self._choice = DraftChoice(sampling)
        self._requests: dict[str, _Followed] = {}
        self.kv_cache_bytes = self._num_groups = 0

    @property
    def specs(self) -> Mapping[str, KVCacheSpec]:
        """Its layers, behind the prefix that tells them from the model's."""
        return {PREFIX + name: spec for name, spec in self._forward.specs.items()}

    @property
    def weight_bytes(self) -> int:
        """Those of its forward pass."""
        return self._forward.weight_bytes

    def allocate(self, config: KVCacheConfig) -> None:
        """Keys and values of its own layers."""
        caches = self._forward.memory.allocate(draft_layers(config))
        self._forward.bind(caches)
        self.kv_cache_bytes = num_bytes(caches)
        self._num_groups = num_groups(caches)
        self._requests = {key: _Followed() for key in self._requests}

    def release(self) -> None:
        """Let go of them."""
        self._forward.bind({})
        self.kv_cache_bytes = 0

    def begin(self, request: NewRequestData) -> None:
        """Nothing of it is computed."""
        self._requests[request.request_id] = _Followed()

    def end(self, request_id: str, token_ids: npt.NDArray[np.int32], *, num_prompt_tokens: int) -> None:  # noqa: ARG002
        """Forget it."""
        self._requests.pop(request_id, None)

    def to(self, device: torch.device) -> None:
        """Move its weights."""
        self._forward.to(device)

    @torch.inference_mode()
    def propose(self, step: DraftStep) -> list[list[int]]:
        """Catch up with the requests that want drafts, and go on from there, a token of each at a time."""
        drafts: list[list[int]] = [[] for _ in step.requests]
        going = self._catch_up(step, drafts)
        for place in range(1, max((self._wanted(step, i) for i in going), default=0)):
            going = [i for i in going if self._wanted(step, i) > place]
            first = np.array([len(step.requests[i].token_ids) + place - 1 for i in going])
            tokens = [np.array(drafts[i][-1:]) for i in going]
            self._run(step, going, first, tokens, going, place, drafts)
        for i, request in enumerate(step.requests):
            if drafts[i]:
                followed = self._requests[request.request_id]
                followed.first, followed.drafts = len(request.token_ids), drafts[i]
        return drafts

    def _catch_up(self, step: DraftStep, drafts: list[list[int]]) -> list[int]:
        """Compute what is new of the requests that want drafts, and draft a token of those that are done with. Returns these."""
        running, first, tokens, done, left = list[int](), list[int](), list[IntArray](), list[int](), _MOST_BEHIND
        for i, request in enumerate(step.requests):
            if self._wanted(step, i) <= 0 or left <= 0:
                continue
            followed = self._requests[request.request_id]
            self._learn(followed, request.token_ids)
            end = min(len(request.token_ids), followed.computed + left)
            running.append(i)
            first.append(followed.computed)
            tokens.append(request.token_ids[followed.computed : end].astype(np.int64))
            left -= end - followed.computed
            followed.computed = end
            if end == len(request.token_ids):
                done.append(i)
        if running:
            self._run(step, running, np.array(first), tokens, done, 0, drafts)
        return done

    def _wanted(self, step: DraftStep, i: int) -> int:
        """Drafts of a request, as far as the drafter's own limit of length goes."""
        request = step.requests[i]
        return min(request.num_drafts, self._model.max_len - len(request.token_ids))

    def _learn(self, followed: _Followed, token_ids: npt.NDArray[np.int32]) -> None:
        """What became of the last drafts: those that held are computed."""
        drafts, first = followed.drafts, followed.first
        followed.drafts = []
        if not drafts or len(token_ids) <= first:
            return
        held = num_held(drafts, token_ids[first : first + len(drafts)].tolist())
        followed.arms.held(len(drafts), held)
        # The last draft was not computed.
        followed.computed = min(first + min(held, len(drafts) - 1), len(token_ids) - 1)

    def _run(
        self,
        step: DraftStep,
        requests: Sequence[int],
        first: IntArray,
        tokens: Sequence[IntArray],
        drafting: Sequence[int],
        place: int,
        drafts: list[list[int]],
    ) -> None:
        """A forward pass over ``tokens`` of ``requests`` from positions ``first`` on, and a draft for each of ``drafting``."""
        batch = step.lay_out(requests, first, tokens)
        ends = dict(zip(requests, (np.cumsum([len(each) for each in tokens]) - 1).tolist(), strict=True))
        rows = np.array([ends[i] for i in drafting], dtype=np.int64)
        own = replace(batch, attention=batch.attention[: self._num_groups])
        logits = self._forward.run(own, rows).logits
        if not drafting:
            return
        arms = [self._requests[step.requests[i].request_id].arms for i in drafting]
        inputs = self._choice.inputs(step, drafting, arms, place)
        for i, token in zip(
            drafting, self._sampler.sample(logits[:, : self._vocab_size], inputs).token_ids.tolist(), strict=True
        ):
            drafts[i].append(token)


def load_draft_model(
    config: EngineCoreConfig, model: LoadedModel, forward: ForwardConfig, progress: Progress
) -> DraftModel:
    """The checkpoint that ``speculative.model`` names, computing as ``forward`` says. Raises ModelLoadError for one that
    cannot draft for ``model``.
    """
    speculative = config.speculative
    checkpoint = draft_checkpoint(config)
    try:
        if (task := resolve_task(checkpoint)) != "generate":
            raise ModelLoadError(f"it is a model that {task}s, and does not generate")
        check_vocabulary(Path(config.model.path), Path(speculative.model))
        drafter = load_model(checkpoint, forward.device, progress)
    except ModelLoadError as e:
        words = str(e)
        if words.startswith("speculative.model"):
            raise
        raise ModelLoadError(f"speculative.model is {speculative.model!r}, which cannot draft: {words}") from e
    built = build_forward(drafter, replace(forward, part=None, int8=False, cache_dtype=None))
    return DraftModel(drafter, built, model.vocab_size, speculative.draft_sampling)


def draft_checkpoint(config: EngineCoreConfig) -> ModelConfig:
    """How the checkpoint that drafts is loaded: as the model is."""
    return msgspec.structs.replace(
        config.model,
        path=config.speculative.model,
        revision=config.speculative.revision,
        served_model_name="",
        quantization="auto",
        load_format="auto",
        max_model_len=None,
        task="auto",
    )
