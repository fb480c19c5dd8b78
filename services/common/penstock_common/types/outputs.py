"""Outputs of an engine step: tokens, log-probabilities, vectors, and the statistics beside them."""

import enum
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import TypeAlias

import msgspec

from penstock_common.errors import RequestFailed, request_failed
from penstock_common.lora_registry import LoraHeld
from penstock_common.types.kv_transfer import EngineRole, KvCacheEvent, KvSource
from penstock_common.types.media import MediaLimits
from penstock_common.types.request import Vectors

# Log-probabilities of consecutive positions as flat arrays.


class Logprobs(msgspec.Struct):
    """Field for field ``penstock.common.v1.Logprobs``, as far as engines fill it.

    Entries of position i are ``offsets[i]`` to ``offsets[i + 1]`` of the three arrays; the first of them is the chosen
    token, the likeliest follow. ``logprobs``: natural logarithms of the raw distribution, before penalties and temperature.
    ``ranks``: 1 is the likeliest of the vocabulary. ``tokens``: the text of each entry, empty until the frontend fills it.
    """

    offsets: list[int] = msgspec.field(default_factory=lambda: [0])
    token_ids: list[int] = []
    logprobs: list[float] = []
    ranks: list[int] = []
    tokens: list[str] = []

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def add(self, token_ids: list[int], logprobs: list[float], ranks: list[int]) -> None:
        """Append one position."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.ranks += ranks
        self.offsets.append(len(self.token_ids))

    def extend(self, other: "Logprobs") -> None:
        """Append the positions of ``other``."""
        base = len(self.token_ids)
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.ranks += other.ranks
        self.tokens += other.tokens
        self.offsets += [base + offset for offset in other.offsets[1:]]

    def slice(self, start: int, stop: int) -> "Logprobs":
        """A copy of positions ``start`` to ``stop``."""
        first, last = self.offsets[start], self.offsets[stop]
        return Logprobs(
            offsets=[offset - first for offset in self.offsets[start : stop + 1]],
            token_ids=self.token_ids[first:last],
            logprobs=self.logprobs[first:last],
            ranks=self.ranks[first:last],
            tokens=self.tokens[first:last],
        )


# Outputs that are new tokens and nothing else, as columns: what a step says of most of its requests.

UINT32 = "I"
"""Type code of the columns' numbers, which are unsigned and have 4 bytes."""

NewTokens: TypeAlias = tuple[str, list[int]]
"""The id of a request, and its new tokens."""


def column() -> "array[int]":
    """An empty column."""
    return array(UINT32)


class TokenColumns(msgspec.Struct, kw_only=True):
    """One row per output: the number that its request has on the session, the index of its first new token in the whole output,
    and how many new tokens there are, where that is not one for every row (``counts`` is empty then). ``token_ids`` are those
    of all rows, one row behind the other. ``drafts``: the drafted tokens that were verified for each row, of which all its tokens
    but the last held; empty where there were none.
    """

    request_numbers: "array[int]" = msgspec.field(default_factory=column)
    offsets: "array[int]" = msgspec.field(default_factory=column)
    counts: "array[int]" = msgspec.field(default_factory=column)
    token_ids: "array[int]" = msgspec.field(default_factory=column)
    drafts: "array[int]" = msgspec.field(default_factory=column)

    def __len__(self) -> int:
        return len(self.request_numbers)

    def add(self, request_number: int, offset: int, token_ids: Sequence[int], num_drafts: int = 0) -> None:
        """One more row. Raises OverflowError, and adds nothing, for a token id that has no 32 bits. Hot: once per output."""
        if len(token_ids) != 1 or self.counts:
            self._add_counted(token_ids)
        else:
            self.token_ids.append(token_ids[0])
        if num_drafts or self.drafts:
            self._add_drafts(num_drafts)
        self.offsets.append(offset)
        self.request_numbers.append(request_number)

    def _add_counted(self, token_ids: Sequence[int]) -> None:
        new = array(UINT32, token_ids)
        if not self.counts:
            self.counts.extend([1] * len(self))
        self.token_ids.extend(new)
        self.counts.append(len(new))

    def _add_drafts(self, num_drafts: int) -> None:
        if not self.drafts:
            self.drafts.extend([0] * len(self))
        self.drafts.append(num_drafts)

    def rows(self) -> Iterable[tuple[int, int, list[int]]]:
        """The number of its request, the offset and the new tokens of each row. Hot: once per output."""
        if not self.counts:
            return zip(self.request_numbers, self.offsets, ([token_id] for token_id in self.token_ids), strict=True)
        return self._counted_rows()

    def _counted_rows(self) -> Iterable[tuple[int, int, list[int]]]:
        all_token_ids, start = self.token_ids.tolist(), 0
        for number, offset, count in zip(self.request_numbers, self.offsets, self.counts, strict=True):
            yield number, offset, all_token_ids[start : start + count]
            start += count

    def drafted(self) -> Iterator[tuple[int, int, int]]:
        """The number of its request, the drafted tokens and those of them that held, of each row that had some."""
        counts = self.counts or repeat(1)
        for number, num_drafts, count in zip(self.request_numbers, self.drafts, counts, strict=False):
            if num_drafts:
                yield number, num_drafts, min(count - 1, num_drafts)

    def cut(self, num_rows: int) -> "list[TokenColumns]":
        """The same in several, of up to ``num_rows`` rows each."""
        pieces = [TokenColumns()]
        for row, num_drafts in zip(self.rows(), self.drafts or repeat(0), strict=False):
            if len(pieces[-1]) == num_rows:
                pieces.append(TokenColumns())
            pieces[-1].add(*row, num_drafts)
        return pieces


class FinishReason(enum.IntEnum):
    """Why a request ended. Values equal ``penstock.common.v1.FinishReason``.

    ERROR is a retryable internal error: a client sees UNAVAILABLE or INTERNAL, never a normal end. HANDOFF: the request goes on
    elsewhere, which no client sees.
    """

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    REPETITION = 5
    HANDOFF = 6


class EventType(enum.IntEnum):
    """Values equal ``penstock.common.v1.EngineCoreEventType``."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct, frozen=True):
    """``timestamp`` is the engine's monotonic clock in seconds: compare it only with others of the same process."""

    type: EventType
    timestamp: float


class RequestError(msgspec.Struct, frozen=True, kw_only=True):
    """Why the engine ended a request without a normal end (FinishReason.ERROR, or ABORT when its time was up).

    ``code`` is a gRPC status code name, ``field`` the request field at fault when there is one, ``reason`` a stable
    UPPER_SNAKE_CASE word, ``retry_after`` seconds after which a retry may succeed, ``quota_subject`` whose quota is used up.
    """

    code: str
    message: str
    field: str = ""
    reason: str = ""
    retry_after: float | None = None
    quota_subject: str = ""

    @classmethod
    def from_exception(cls, error: RequestFailed) -> "RequestError":
        """The same failure as data."""
        return cls(**{name: getattr(error, name) for name in cls.__struct_fields__})

    def to_exception(self) -> RequestFailed:
        """The failure as an exception; an unknown code becomes Internal."""
        failed = request_failed(self.code, self.message, field=self.field, reason=self.reason)
        failed.retry_after, failed.quota_subject = self.retry_after, self.quota_subject
        return failed


class PrefillStats(msgspec.Struct, frozen=True, kw_only=True):
    """Sent once with the first output of an attempt. Counts are tokens."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_host_tokens: int = 0
    """Of the cached ones, those that came from the engine's host memory; likewise from its disk, and from another engine."""
    num_disk_tokens: int = 0
    num_peer_tokens: int = 0


class SpecDecodingStats(msgspec.Struct, kw_only=True):
    """Drafted tokens of an engine, or of a request; counts only grow. ``num_drafts``: times that a request had drafts in a step.
    ``num_accepted_tokens_per_pos``: by the place in a draft.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Add a draft of ``num_drafted`` tokens, of which the first ``num_accepted`` held."""
        per_pos = self.num_accepted_tokens_per_pos
        per_pos.extend([0] * (num_drafted - len(per_pos)))
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            per_pos[place] += 1

    def copy(self) -> "SpecDecodingStats":
        """The counts as they are now."""
        return msgspec.structs.replace(self, num_accepted_tokens_per_pos=[*self.num_accepted_tokens_per_pos])


Drafts: TypeAlias = tuple[str, SpecDecodingStats]
"""The id of a request, and what is known of its drafts."""


class EngineCoreOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New tokens of one request. ``offset`` is the index of the first new token in the whole output.

    ``new_logprobs`` are those of ``new_token_ids``, ``new_prompt_logprobs`` those of the prompt tokens computed since the
    last output; the first prompt token has none.
    """

    request_id: str
    attempt: int = 0
    offset: int = 0
    new_token_ids: list[int] = []
    new_logprobs: Logprobs | None = None
    new_prompt_logprobs: Logprobs | None = None
    pooling_output: Vectors | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: RequestError | None = None
    events: list[EngineCoreEvent] = []
    prefill_stats: PrefillStats | None = None
    num_nans_in_logits: int = 0
    spec_decoding_stats: SpecDecodingStats | None = None
    """Of the attempt so far, on its last output and those of steps that verified drafts; None where nothing was drafted."""
    kv_source: KvSource | None = None
    """Who keeps the request's keys and values, on its last output."""
    kv_params: str = ""
    """What a plugin's connector says of it, on its last output: a JSON object, or nothing."""


class LoraStats(msgspec.Struct, frozen=True, kw_only=True):
    """The LoRA adapters of an engine's requests, by name: ``active`` among those that run; ``waiting`` for that, at most
    ``MAX_WAITING_NAMES`` of them. Counts of loads, evictions and requests, and
    ``load_seconds``, only grow. ``num_found``: requests that found their adapter in memory.
    """

    max_loras: int = 0
    active: list[str] = []
    waiting: list[str] = []
    num_waiting_reqs: int = 0
    num_loading_reqs: int = 0
    num_cached: int = 0
    cached_bytes: int = 0
    num_loads: int = 0
    load_seconds: float = 0.0
    num_evictions: int = 0
    num_requests: int = 0
    num_found: int = 0
    held: LoraHeld | None = None
    """None: as it was last told on the same stream."""


MAX_WAITING_NAMES = 32


class MediaStats(msgspec.Struct, frozen=True, kw_only=True):
    """Media of an engine's requests. Counts only grow: ``encoded_embeds``, and items that were asked for
    (``encoder_cache_queries``) and were there (``encoder_cache_hits``). ``pending_embeds`` are to be computed for requests that
    run or wait, of which ``num_waiting_reqs`` wait for nothing else. ``encoder_cache_usage`` is a fraction in [0, 1],
    ``receiver_cache_bytes`` are those of features in host memory.
    """

    pending_embeds: int = 0
    encoded_embeds: int = 0
    encoder_cache_queries: int = 0
    encoder_cache_hits: int = 0
    encoder_cache_usage: float = 0.0
    receiver_cache_bytes: int = 0
    num_waiting_reqs: int = 0


class KvTransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that an engine loads from elsewhere, and those that it keeps for other engines. The first two count prompt tokens
    and only grow: those that were not in the KV cache, and of these the ones whose blocks were loaded.
    """

    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    num_leases: int = 0
    num_leased_blocks: int = 0
    leased_bytes: int = 0


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's load after a step. Counters only grow; ``kv_cache_usage`` is a fraction in [0, 1].

    ``prefix_cache_queries`` and ``prefix_cache_hits`` count tokens. ``seconds_since_last_step`` is 0 while idle.
    ``wedged``: the engine has work and its last step is older than it may be.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    step_counter: int = 0
    current_wave: int = 0
    seconds_since_last_step: float = 0.0
    wedged: bool = False
    spec_decoding_stats: SpecDecodingStats | None = None
    """None for an engine that does not speculate."""
    lora: LoraStats | None = None
    """None for an engine that applies no adapters."""
    media: MediaStats | None = None
    """None for an engine that takes no media."""
    kv_transfer: KvTransferStats | None = None
    """None for an engine that loads no blocks and gives none."""

    def without_held(self) -> "SchedulerStats":
        """The same, for those who know which adapters the engine holds."""
        if self.lora is None or self.lora.held is None:
            return self
        return msgspec.structs.replace(self, lora=msgspec.structs.replace(self.lora, held=None))

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Of the prompt tokens looked up in the prefix cache, the part that was there; 0 before the first."""
        return self.prefix_cache_hits / max(self.prefix_cache_queries, 1)


class UtilityOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a utility call: a msgpack ``result``, or ``error`` with a gRPC status code name."""

    call_id: int
    result: bytes = b""
    error: RequestError | None = None


class EngineCoreOutputs(msgspec.Struct, kw_only=True):
    """Everything one step has to say to one frontend. ``timestamp``: the engine's monotonic clock, seconds.

    ``tokens`` come before what ``outputs`` has of the same request.
    """

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: list[str] = []
    kv_events: list[KvCacheEvent] = []
    tokens: TokenColumns | None = None


class LoraLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine takes of LoRA adapters: how many among running requests, of which rank, in how many bytes of host memory."""

    max_loras: int
    max_lora_rank: int
    cpu_memory: int


class EngineReady(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of an engine on a session: who it is and what it can hold (lengths in tokens).

    ``hidden_size``: numbers in a vector that stands for a prompt token; 0 where it takes none, None where it does not say.
    ``embedding_size``: numbers in a vector that it computes; 0 where it computes none, None where it does not say.
    ``config``: what its tokens depend on, by name, of which ``config_hash`` is the hash; both empty where it does not say.
    ``max_message_bytes``: the largest message that it receives; ``max_tensor_bytes``: of tensors in chunks that it holds at once.
    0 where it does not say. ``max_num_seqs``: requests that it runs at once, 0 where it does not say.
    """

    engine_id: str
    incarnation: str
    model: str
    max_model_len: int
    num_kv_blocks: int
    block_size: int
    vocab_size: int
    revision: str = ""
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    config_hash: str = ""
    config: dict[str, str] = {}
    capabilities: tuple[str, ...] = ()
    hidden_size: int | None = None
    embedding_size: int | None = None
    max_num_seqs: int = 0
    max_message_bytes: int = 0
    max_tensor_bytes: int = 0
    lora: LoraLimits | None = None
    """None for an engine that applies no adapters."""
    receiver_cache_bytes: int = 0
    """Bytes of features of media that it keeps for a session; 0: each request brings its own."""
    shared_memory_id: str = ""
    """Of the memory in which frontends may leave tensors for it; empty: it takes none."""
    media: tuple[MediaLimits, ...] = ()
    """Media that it takes, by modality."""
    encoder_cache_size: int = 0
    """Embeddings of media that it keeps; 0: it takes no media."""
    role: EngineRole = EngineRole.BOTH
    kv_address: str = ""
    """Where others get its blocks; empty: it gives none away."""
    kv_fingerprint: bytes = b""
    """Between engines of one, blocks may move; empty: none of its blocks do."""
    shared_memory_nonce: bytes = b""
    """What it has read of the frontend's probe in shared memory, where tensors of all kinds may be left for it then; empty:
    nothing."""
