"""Drafts by a head, which generates a chain of tokens from hidden states of the target (the model that verifies the
drafts). The method is EAGLE (Li et al., 2024, 2025).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from penstock_common.checkpoint import problem
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.executor import Progress
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig
from penstock_enginecore.core.scheduler.output import NewRequestData
from penstock_enginecore.forward.base import ChainedDraws, ForwardBatch, ForwardPass
from penstock_enginecore.forward.build import ForwardConfig
from penstock_enginecore.models.checkpoint import weight_files
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.models.quantization.weights import open_tensors
from penstock_enginecore.sample.base import FloatArray, RowKinds, Sampler, SamplingInputs
from penstock_enginecore.speculation.base import DraftStep, WithLayers
from penstock_enginecore.speculation.draft_model import Arms, DraftChoice, check_vocabulary, draft_checkpoint, num_held
from penstock_enginecore.speculation.head import Kind, read_head, read_head_config
from penstock_enginecore.speculation.head_forward import HeadPass, NativeHead, build_head

# Hidden states of positions that the head has not processed yet.


class PendingStates:
    """Hidden states of one request, for the positions from ``start`` to ``end - 1``."""

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self._parts: list[torch.Tensor] = []

    def __len__(self) -> int:
        return self.end - self.start

    def add(self, position: int, states: torch.Tensor) -> None:
        """Add ``states`` ``[tokens, width]``, starting at ``position``.

        Existing states at or after ``position`` belong to rejected tokens and are replaced. If the existing states end
        before ``position``, so that states between are missing, all existing states are dropped.
        """
        if not self.start <= position <= self.end:
            self._parts, self.start, self.end = [], position, position
        self._cut(position - self.start)
        # If the states are a small part of a step's states, copy them. Otherwise a view of a few rows would keep the
        # states of the complete step in memory.
        shared = states.untyped_storage().nbytes() > 2 * states.nbytes
        self._parts.append(states.clone() if shared else states)
        self.end = position + len(states)

    def take(self, count: int) -> torch.Tensor:
        """Remove and return the first ``count`` states: ``[count, width]``."""
        whole = self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
        self._parts = [whole[count:]] if count < len(self) else []
        self.start += count
        return whole[:count]

    def _cut(self, count: int) -> None:
        """Keep only the first ``count`` states."""
        kept: list[torch.Tensor] = []
        for part in self._parts:
            if count <= 0:
                break
            kept.append(part[:count])
            count -= len(kept[-1])
        self._parts = kept
        self.end = self.start + sum(map(len, kept))


_MOST_TOKENS = 512
"""Maximum number of tokens in a pass of the head, so that the pass takes little time compared with the target's
steps.
"""
_MOST_PENDING = 32
"""Number of pending hidden states of a request at which the head processes them. One pass over many positions takes
less time than many passes over one position each.
"""


class _Followed:
    """State that the drafter keeps for a request.

    Attributes:
        pending: Hidden states of positions whose keys and values are not computed yet.
        first: Number of tokens that the request had when ``drafts`` were made.
    """

    def __init__(self, num_computed: int) -> None:
        self.pending = PendingStates(num_computed)
        self.first = 0
        self.drafts: list[int] = []
        self.arms = Arms()


class Eagle(WithLayers):
    """A ``Drafter`` with an EAGLE head or a multi-token-prediction layer.

    The head computes keys and values from the target's hidden states, for positions whose next token is known. The head
    computes them before it drafts, or when many states are pending. While the head drafts, it computes keys and values
    from its own output. These keys and values are later recomputed from the target's states.

    Requests that want no drafts are ignored. For positions in cached blocks, the head uses the keys and values that an
    earlier request computed. If no earlier request computed them, drafts are less accurate.
    """

    def __init__(
        self,
        name: str,
        forward: HeadPass,
        sampler: Sampler,
        target_tokens: torch.Tensor | None,
        vocab_size: int,
        state_layers: Sequence[int],
        sampling: str,
    ) -> None:
        """Args:
        target_tokens: Token of the target for each token of the head, or None if the two vocabularies are equal.
        vocab_size: Vocabulary size of the model that verifies.
        """
        super().__init__(forward)
        self.name = name
        self.state_layers = state_layers
        self._forward = forward
        self._chained = forward if isinstance(forward, NativeHead) and forward.chains else None
        self._sampler = sampler
        self._target_tokens = None if target_tokens is None else target_tokens.numpy()
        self._vocab_size = vocab_size
        self._choice = DraftChoice(sampling)
        self._requests: dict[str, _Followed] = {}

    def allocate(self, config: KVCacheConfig) -> None:
        """Allocate memory for keys and values, and remove all requests."""
        super().allocate(config)
        self._requests.clear()

    def begin(self, request: NewRequestData) -> None:
        """Add a request. Its cached tokens count as computed."""
        if request.sampling_params.num_speculative_tokens != 0:
            self._requests[request.request_id] = _Followed(request.num_computed_tokens)

    def end(self, request_id: str, token_ids: npt.NDArray[np.int32], *, num_prompt_tokens: int) -> None:  # noqa: ARG002
        """Delete the state of the request."""
        self._requests.pop(request_id, None)

    def to(self, device: torch.device) -> None:
        self._forward.to(device)

    @torch.inference_mode()
    def observe(self, step: DraftStep, first: IntArray, states: Sequence[torch.Tensor]) -> None:
        """Store the hidden states of a step. For requests with many pending states, compute keys and values from these
        states.
        """
        waiting = {}
        for i, (request, position, own) in enumerate(zip(step.requests, first.tolist(), states, strict=True)):
            followed = self._requests.get(request.request_id)
            if followed is None:
                continue
            followed.pending.add(position, own)
            if len(followed.pending) > _MOST_PENDING:
                known = request.token_ids[followed.pending.start + 1 : followed.pending.end + 1]
                unknown = np.flatnonzero(known < 0)
                waiting[i] = int(unknown[0]) if len(unknown) else len(known)
        self._catch_up(step, waiting)

    @torch.inference_mode()
    def propose(self, step: DraftStep) -> list[list[int]]:
        """Compute the pending positions of requests that want drafts. Then draft tokens for these requests."""
        drafts: list[list[int]] = [[] for _ in step.requests]
        waiting = {}
        for i, request in enumerate(step.requests):
            followed = self._requests.get(request.request_id)
            if request.num_drafts <= 0 or followed is None:
                continue
            self._learn(followed, request.token_ids)
            count = len(request.token_ids) - 1 - followed.pending.start
            if 0 < count <= len(followed.pending):
                waiting[i] = count
        going = sorted(waiting, key=lambda i: -step.requests[i].num_drafts)
        if going:
            arms = [self._requests[step.requests[i].request_id].arms for i in going]
            inputs, uniforms = self._choice.first(step, going, arms, step.requests[going[0]].num_drafts)
            kinds = inputs.kinds
            # If there are too many tokens for one pass, first compute all tokens of each request except the last.
            ahead = {i: count - 1 for i, count in waiting.items()} if sum(waiting.values()) > _MOST_TOKENS else {}
            self._catch_up(step, ahead)
            counts = {i: waiting[i] - ahead.get(i, 0) for i in going}
            if self._chained is None or kinds.any_filtered:
                self._loop(step, counts, arms, inputs, drafts)
            else:
                self._chain(self._chained, step, counts, kinds, uniforms, drafts)
        for i in going:
            followed = self._requests[step.requests[i].request_id]
            followed.first, followed.drafts = len(step.requests[i].token_ids), drafts[i]
        return drafts

    def _loop(
        self,
        step: DraftStep,
        waiting: Mapping[int, int],
        arms: Sequence[Arms],
        inputs: SamplingInputs,
        drafts: list[list[int]],
    ) -> None:
        """Compute pending positions and draft, with one pass of the head and one sampler call for each draft position.

        Args:
            step: The completed step.
            arms: The ``Arms`` of each request, in the order of ``waiting``.
            drafts: Receives the drafts, by request index.
            waiting: Number of positions to compute, by request index. Requests are sorted by number of drafts, largest
                first.
            inputs: Sampling inputs of the first draft position.
        """
        going, place = list(waiting), 0
        batch, states = self._take(step, waiting)
        states = self._forward.run(batch, states, batch.attention[0].query_start_loc[1:] - 1, own=False)
        while True:
            for i, token in zip(going, self._choose(self._forward.logits(states), inputs), strict=True):
                drafts[i].append(token)
            place += 1
            going = [i for i in going if step.requests[i].num_drafts > place]
            if not going:
                return
            first = np.array([len(step.requests[i].token_ids) + place - 2 for i in going])
            batch = self._lay_out(step, going, first, [np.array(drafts[i][-1:]) for i in going])
            states = self._forward.run(batch, states[: len(going)], np.arange(len(going)), own=True)
            inputs = self._choice.inputs(step, going, arms[: len(going)], place)

    def _chain(
        self,
        forward: NativeHead,
        step: DraftStep,
        waiting: Mapping[int, int],
        kinds: RowKinds,
        uniforms: FloatArray,
        drafts: list[list[int]],
    ) -> None:
        """Draft as ``_loop`` does, but with one call of ``forward``. ``uniforms`` are the random numbers ``[draft
        positions, requests]``, and ``kinds`` says how each row is sampled.
        """
        going = list(waiting)
        counts = np.array([step.requests[i].num_drafts for i in going])
        batch, states = self._take(step, waiting, ahead=len(uniforms) - 1)
        draws = ChainedDraws(counts, kinds.plain_temperature, uniforms, self._vocab_size)
        tokens = forward.chain(batch, states, draws, self._target_tokens)
        for i, count, chosen in zip(going, counts, tokens.T.tolist(), strict=True):
            drafts[i] = chosen[:count]

    def _catch_up(self, step: DraftStep, waiting: Mapping[int, int]) -> None:
        """Compute keys and values of pending positions in several passes. ``waiting`` has the number of pending
        positions by request index.
        """
        left = {i: count for i, count in waiting.items() if count > 0}
        while left:
            taken, room = dict[int, int](), _MOST_TOKENS
            for i, count in left.items():
                if room > 0:
                    taken[i] = min(count, room)
                    room -= taken[i]
            self._forward.run(*self._take(step, taken), np.zeros(0, dtype=np.int64), own=False)
            left = {i: count - taken.get(i, 0) for i, count in left.items() if count > taken.get(i, 0)}

    def _take(
        self, step: DraftStep, waiting: Mapping[int, int], *, ahead: int = 0
    ) -> tuple[ForwardBatch, torch.Tensor]:
        """Remove pending states, and build a batch of their positions, each with the token after it. Returns the batch
        and the target's states.

        Args:
            step: The current step.
            waiting: Number of positions to take, by request index.
            ahead: Number of positions after these positions that block tables must also cover.
        """
        first, tokens, states = list[int](), list[IntArray](), list[torch.Tensor]()
        for i, count in waiting.items():
            request, pending = step.requests[i], self._requests[step.requests[i].request_id].pending
            first.append(pending.start)
            tokens.append(request.token_ids[pending.start + 1 : pending.start + 1 + count].astype(np.int64))
            states.append(pending.take(count))
        return self._lay_out(step, list(waiting), np.array(first), tokens, ahead), torch.cat(states)

    def _lay_out(
        self, step: DraftStep, requests: Sequence[int], first: IntArray, tokens: Sequence[IntArray], ahead: int = 0
    ) -> ForwardBatch:
        """Build the batch of tokens with the block tables of the head's layers."""
        batch = step.lay_out(requests, first, tokens, ahead=ahead)
        return replace(batch, attention=batch.attention[: self.num_groups])

    def _choose(self, logits: torch.Tensor, inputs: SamplingInputs) -> list[int]:
        """Sample a token for each row of logits, and return it as the target's token."""
        found = self._sampler.sample(logits, inputs).token_ids
        tokens: list[int] = (found if self._target_tokens is None else self._target_tokens[found]).tolist()
        return tokens

    @staticmethod
    def _learn(followed: _Followed, token_ids: npt.NDArray[np.int32]) -> None:
        """Record how many of the last drafts were accepted."""
        drafts, first = followed.drafts, followed.first
        followed.drafts = []
        if drafts and len(token_ids) > first:
            known = token_ids[first : first + len(drafts)].tolist()
            followed.arms.held(len(drafts), num_held(drafts, known))


def load_eagle(
    config: EngineCoreConfig, model: LoadedModel, target: ForwardPass, forward: ForwardConfig, progress: Progress
) -> Eagle:
    """Load the head ``speculative.model`` for ``model``, whose forward pass is ``target``. Raises ModelLoadError if the
    head does not fit the model.
    """
    speculative = config.speculative
    kind: Kind = "eagle3" if speculative.method == "eagle3" else "eagle"
    progress(f"loading a {kind} head from {speculative.model}")
    checkpoint = draft_checkpoint(config)
    try:
        if reason := problem(speculative.model, trust_remote_code=True, tokenizer=False):
            raise ModelLoadError(reason)
        directory = weight_files(checkpoint)
        check_vocabulary(Path(config.model.path), directory)
        of_head = read_head_config(directory, kind, model.module.config.num_hidden_layers)
        size, vocab = model.hidden_size, model.vocab_size
        shared = None if of_head.vocab_size != vocab else partial(_lm_head, config)
        head, tokens = read_head(directory, of_head, hidden_size=size, vocab_size=vocab, lm_head=shared)
    except ModelLoadError as e:
        if str(e).startswith("speculative.model"):
            raise
        raise ModelLoadError(f"speculative.model {speculative.model!r} cannot draft for this model: {e}") from e
    built, sampler = build_head(head, model, target, replace(forward, part=None, int8=False, cache_dtype=None))
    sampling = speculative.draft_sampling
    return Eagle(kind, built, sampler, tokens, vocab, of_head.state_layers, sampling)


def _lm_head(config: EngineCoreConfig) -> torch.Tensor:
    """Read the served model's lm_head from its files, because the decoder has packed the loaded lm_head. Raises
    ModelLoadError.
    """
    with open_tensors(weight_files(config.model)) as stored:
        # the model uses the embedding as its lm_head (tied weights)
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            if name in stored:
                return stored[name][...]
    raise ModelLoadError(
        "the head has no lm_head, and the model's files have no tensor lm_head.weight that it could use"
    )
