"""Drafts by a smaller model with the same vocabulary. The model generates a chain of tokens (Leviathan et al., 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from penstock_common.files import read_input
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.config import EngineCoreConfig, ModelConfig
from penstock_enginecore.core.executor import Progress
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig
from penstock_enginecore.core.scheduler.output import NewRequestData
from penstock_enginecore.forward.base import ChainedDraws, ChainedForward, ForwardBatch
from penstock_enginecore.forward.build import BuiltForward, ForwardConfig, build_forward
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import LoadedModel, load_model, read_config
from penstock_enginecore.models.support import is_recurrent
from penstock_enginecore.pooling.embedder import resolve_task
from penstock_enginecore.sample.base import FloatArray, RowKinds, SamplingInputs
from penstock_enginecore.speculation.base import DraftStep, Stateless, WithLayers

# Two ways to sample drafts: coupled and greedy. Each request uses the way whose drafts are accepted more often.

_TRIES = 6
_AGAIN = 24
_RATE = 0.15


class Arms:
    """Chooses between coupled and greedy drafts for one request.

    Coupled drafts are sampled with the request's own random numbers. Coupled drafts equal the model's tokens if the
    distributions of drafter and model are similar. Greedy drafts are the drafter's most likely tokens. At first,
    coupled and greedy drafts are tried alternately. After that, the kind with the better acceptance is used, and the
    other kind is tried from time to time.

    Attributes:
        coupled: Whether the current drafts are coupled.
    """

    def __init__(self) -> None:
        self._held = {True: 0.0, False: 0.0}
        self._counts = {True: 0, False: 0}
        self._proposals = 0
        self.coupled = True

    def choose(self) -> bool:
        """Choose how the next drafts are sampled. Returns True for coupled drafts, and False for greedy drafts."""
        self._proposals += 1
        better = self._held[True] >= self._held[False]
        if min(self._counts.values()) < _TRIES:
            self.coupled = self._counts[True] <= self._counts[False]
        else:
            self.coupled = better if self._proposals % _AGAIN else not better
        return self.coupled

    def held(self, num_drafted: int, num_accepted: int) -> None:
        """Record how many of the last drafts were accepted."""
        arm = self.coupled
        self._counts[arm] += 1
        rate = max(_RATE, 1 / self._counts[arm])
        self._held[arm] += rate * (num_accepted / num_drafted - self._held[arm])


class DraftChoice:
    """Chooses how drafts are sampled. ``sampling`` is the setting ``speculative.draft_sampling``."""

    def __init__(self, sampling: str) -> None:
        self._sampling = sampling

    def first(
        self, step: DraftStep, drafting: Sequence[int], arms: Sequence[Arms], count: int
    ) -> tuple[SamplingInputs, FloatArray]:
        """Return the sampling inputs of the first draft, and the random numbers of the first ``count`` drafts,
        ``[count, requests]``.

        Args:
            step: The completed step.
            count: Number of drafts.
            drafting: Indices of the requests.
            arms: The ``Arms`` of each request.
        """
        n = len(drafting)
        made = step.sampling([*drafting] * count, np.repeat(np.arange(count), n))
        uniforms = made.uniforms.reshape(count, n)
        first = SamplingInputs(made.settings.of(slice(n)), uniforms[0])
        return self._by_arms(first, arms, 0), uniforms

    def inputs(self, step: DraftStep, drafting: Sequence[int], arms: Sequence[Arms], place: int) -> SamplingInputs:
        """Return the sampling inputs of the draft with index ``place``, which must be at least 1."""
        return self._by_arms(step.sampling(drafting, place), arms, place)

    def _by_arms(self, inputs: SamplingInputs, arms: Sequence[Arms], place: int) -> SamplingInputs:
        temperature = inputs.settings.temperature.copy()
        for row, own in enumerate(arms):
            if temperature[row] and not self._coupled(own, place):
                temperature[row] = 0.0
        return replace(inputs, settings=inputs.settings._replace(temperature=temperature))

    def _coupled(self, arms: Arms, place: int) -> bool:
        if self._sampling != "auto":
            return self._sampling == "coupled"
        return arms.choose() if place == 0 else arms.coupled


def num_held(drafts: Sequence[int], known: Sequence[int]) -> int:
    """Return how many drafts, counted from the first draft, equal the tokens that the model chose."""
    return next(
        (n for n, (a, b) in enumerate(zip(drafts, known, strict=False)) if a != b), min(len(drafts), len(known))
    )


# Comparison of the vocabularies of two checkpoints.


def check_vocabulary(model: Path, drafter: Path) -> None:
    """Raise ModelLoadError for the first token ID whose text differs between the two checkpoints.

    Checkpoints without a ``tokenizer.json`` are not compared.
    """
    files = [folder / "tokenizer.json" for folder in (model, drafter)]
    if not all(file.is_file() for file in files):
        return
    ours, theirs = (_texts(file) for file in files)
    for token_id in sorted(ours.keys() | theirs.keys()):
        if ours.get(token_id) != theirs.get(token_id):
            raise ModelLoadError(
                f"speculative.model is {str(drafter)!r}, but its token {token_id} is {_said(theirs.get(token_id))} and the "
                f"model's is {_said(ours.get(token_id))}; the draft model must have the same vocabulary"
            )


def _texts(file: Path) -> dict[int, str]:
    return {token_id: text for text, token_id in Tokenizer.from_buffer(read_input(file)).get_vocab().items()}


def _said(text: str | None) -> str:
    return "missing" if text is None else repr(text)


_MOST_BEHIND = 512
"""Maximum number of tokens that the drafter computes for all requests after one step, before it drafts. The limit keeps
a long prompt from delaying other requests. The remaining tokens are computed after later steps.
"""


class _Followed:
    """State that the drafter keeps for a request.

    Attributes:
        computed: Number of tokens whose keys and values the drafter has computed.
        first: Number of tokens that the request had when ``drafts`` were made.
    """

    def __init__(self) -> None:
        self.computed = 0
        self.first = 0
        self.drafts: list[int] = []
        self.arms = Arms()


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens of the request with index ``request``, from position ``first``. ``token_ids`` is int64 ``[tokens]``."""

    request: int
    first: int
    token_ids: IntArray


class DraftModel(WithLayers, Stateless):
    """A ``Drafter`` with its own model.

    Before the drafter drafts for a request, it first computes the request's tokens that are not in the drafter's KV
    cache yet. Requests that want no drafts therefore need no time of the drafter. If a request starts with cached
    blocks, the drafter computes the request from the first token, because the cached blocks may lack the drafter's keys
    and values.
    """

    name = "draft_model"

    def __init__(self, model: LoadedModel, built: BuiltForward, vocab_size: int, sampling: str) -> None:
        """Args:
        vocab_size: Vocabulary size of the model that verifies.
        sampling: The setting ``speculative.draft_sampling``.
        """
        super().__init__(built.forward)
        self._model = model
        self._forward = built.forward
        chained = isinstance(built.forward, ChainedForward) and built.forward.chains
        self._chained = cast("ChainedForward", built.forward) if chained else None
        self._sampler = built.sampler
        self._vocab_size = min(vocab_size, model.vocab_size)
        self._choice = DraftChoice(sampling)
        self._requests: dict[str, _Followed] = {}

    def allocate(self, config: KVCacheConfig) -> None:
        """Allocate memory for keys and values, and mark all tokens of all requests as not computed."""
        super().allocate(config)
        self._requests = {key: _Followed() for key in self._requests}

    def begin(self, request: NewRequestData) -> None:
        """Add a request, with no computed tokens."""
        self._requests[request.request_id] = _Followed()

    def end(self, request_id: str, token_ids: npt.NDArray[np.int32], *, num_prompt_tokens: int) -> None:  # noqa: ARG002
        """Delete the state of the request."""
        self._requests.pop(request_id, None)

    def to(self, device: torch.device) -> None:
        self._forward.to(device)

    @torch.inference_mode()
    def propose(self, step: DraftStep) -> list[list[int]]:
        """Compute the tokens that the drafter has not computed yet, for each request that wants drafts. Then draft
        tokens, one token of each request at a time.
        """
        drafts: list[list[int]] = [[] for _ in step.requests]
        behind, drafting = self._behind(step)
        if drafting:
            arms = [self._requests[step.requests[i].request_id].arms for i in drafting]
            inputs, uniforms = self._choice.first(step, drafting, arms, self._wanted(step, drafting[0]))
            kinds = inputs.kinds
            if self._chained is None or kinds.any_filtered:
                self._loop(step, behind, drafting, arms, inputs, drafts)
            else:
                self._chain(self._chained, step, behind, drafting, kinds, uniforms, drafts)
        elif behind:
            self._run(step, behind, ())
        for i in drafting:
            request = step.requests[i]
            followed = self._requests[request.request_id]
            followed.first, followed.drafts = len(request.token_ids), drafts[i]
        return drafts

    def _behind(self, step: DraftStep) -> tuple[list[_Tokens], list[int]]:
        """Return the tokens to compute, and the indices of the requests for which tokens can be drafted after that. In
        both lists, these requests are first. They are sorted by number of drafts, largest first.
        """
        caught_up, others, left = list[_Tokens](), list[_Tokens](), _MOST_BEHIND
        for i, request in enumerate(step.requests):
            if self._wanted(step, i) <= 0 or left <= 0:
                continue
            followed = self._requests[request.request_id]
            self._learn(followed, request.token_ids)
            first, end = followed.computed, min(len(request.token_ids), followed.computed + left)
            tokens = _Tokens(i, first, request.token_ids[first:end].astype(np.int64))
            left -= end - first
            followed.computed = end
            (caught_up if end == len(request.token_ids) else others).append(tokens)
        caught_up.sort(key=lambda tokens: -self._wanted(step, tokens.request))
        return caught_up + others, [tokens.request for tokens in caught_up]

    def _loop(
        self,
        step: DraftStep,
        behind: Sequence[_Tokens],
        drafting: Sequence[int],
        arms: Sequence[Arms],
        inputs: SamplingInputs,
        drafts: list[list[int]],
    ) -> None:
        """Draft with one forward pass and one sampler call for each draft position. ``inputs`` are the sampling inputs
        for the first draft position.
        """
        going, tokens = list(drafting), list(behind)
        for place in range(self._wanted(step, drafting[0])):
            if place:
                going = [i for i in going if self._wanted(step, i) > place]
                ends = [len(step.requests[i].token_ids) + place - 1 for i in going]
                tokens = [_Tokens(i, end, np.array(drafts[i][-1:])) for i, end in zip(going, ends, strict=True)]
                inputs = self._choice.inputs(step, going, arms[: len(going)], place)
            logits = self._run(step, tokens, going)[:, : self._vocab_size]
            for i, token in zip(going, self._sampler.sample(logits, inputs).token_ids.tolist(), strict=True):
                drafts[i].append(token)

    def _chain(
        self,
        forward: ChainedForward,
        step: DraftStep,
        behind: Sequence[_Tokens],
        drafting: Sequence[int],
        kinds: RowKinds,
        uniforms: FloatArray,
        drafts: list[list[int]],
    ) -> None:
        """Draft all positions with one call of ``forward``. ``uniforms`` are the random numbers ``[draft positions,
        drafting]``, and ``kinds`` says how each row is sampled.
        """
        counts = np.array([self._wanted(step, i) for i in drafting])
        batch = self._lay_out(step, behind, len(uniforms) - 1)
        draws = ChainedDraws(counts, kinds.plain_temperature, uniforms, self._vocab_size)
        tokens = forward.chain(batch, draws)
        for i, count, chosen in zip(drafting, counts, tokens.T.tolist(), strict=True):
            drafts[i] = chosen[:count]

    def _wanted(self, step: DraftStep, i: int) -> int:
        """Return the number of drafts that a request wants, limited by the drafter's maximum sequence length."""
        request = step.requests[i]
        return min(request.num_drafts, self._model.max_len - len(request.token_ids))

    def _learn(self, followed: _Followed, token_ids: npt.NDArray[np.int32]) -> None:
        """Compare the last drafts of a request with the tokens that the model chose. The keys and values of accepted
        drafts are already computed.
        """
        drafts, first = followed.drafts, followed.first
        followed.drafts = []
        if not drafts or len(token_ids) <= first:
            return
        held = num_held(drafts, token_ids[first : first + len(drafts)].tolist())
        followed.arms.held(len(drafts), held)
        # The last draft has no keys and values yet.
        followed.computed = min(first + min(held, len(drafts) - 1), len(token_ids) - 1)

    def _lay_out(self, step: DraftStep, tokens: Sequence[_Tokens], ahead: int = 0) -> ForwardBatch:
        """Build the batch of tokens with the block tables of the drafter's layers. The block tables also cover
        ``ahead`` positions after these tokens.
        """
        first = np.array([each.first for each in tokens])
        batch = step.lay_out([each.request for each in tokens], first, [each.token_ids for each in tokens], ahead=ahead)
        return replace(batch, attention=batch.attention[: self.num_groups])

    def _run(self, step: DraftStep, tokens: Sequence[_Tokens], drafting: Sequence[int]) -> torch.Tensor:
        """Run a forward pass. Returns logits ``[drafting, vocab]`` after the last token of each request in
        ``drafting``. These requests are first in ``tokens``.
        """
        rows = np.cumsum([len(each.token_ids) for each in tokens])[: len(drafting)] - 1
        return self._forward.run(self._lay_out(step, tokens), rows).logits


def load_draft_model(
    config: EngineCoreConfig, model: LoadedModel, forward: ForwardConfig, progress: Progress
) -> DraftModel:
    """Load the checkpoint ``speculative.model``. Raises ModelLoadError if it cannot draft for ``model``."""
    speculative = config.speculative
    checkpoint = draft_checkpoint(config)
    try:
        if (task := resolve_task(checkpoint)) != "generate":
            raise ModelLoadError(f"the checkpoint is a pooling model (task {task}), which cannot generate tokens")
        check_vocabulary(Path(config.model.path), Path(speculative.model))
        _check_attends(checkpoint)
        drafter = load_model(checkpoint, forward.device, progress)
    except ModelLoadError as e:
        words = str(e)
        if words.startswith("speculative.model"):
            raise
        raise ModelLoadError(f"speculative.model {speculative.model!r} cannot draft for this model: {words}") from e
    built = build_forward(drafter, replace(forward, part=None, int8=False, cache_dtype=None))
    return DraftModel(drafter, built, model.vocab_size, speculative.draft_sampling)


def _check_attends(checkpoint: ModelConfig) -> None:
    """Raise ModelLoadError if the draft model has recurrent layers, whose states drafters do not keep."""
    text_config = read_config(checkpoint).get_text_config()
    if is_recurrent(text_config):
        raise ModelLoadError(
            f"the checkpoint's layers are recurrent (model_type {text_config.model_type!r}), and drafters keep no "
            "recurrent states; use a model that has only attention layers, or set speculative.method to 'ngram'"
        )


def draft_checkpoint(config: EngineCoreConfig) -> ModelConfig:
    """Return the model config for the draft checkpoint. The result equals the served model's config, except for
    properties of the checkpoint itself.
    """
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
