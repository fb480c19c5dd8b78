"""Outputs of an engine step: tokens, log-probabilities, vectors and statistics."""

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
    """Log-probabilities, with the fields of ``penstock.common.v1.Logprobs`` that engines set.

    The entries of position i in the arrays are those from ``offsets[i]`` to ``offsets[i + 1] - 1``. The first entry is
    the chosen token. The next entries are the most likely tokens, or the tokens of ``logprob_token_ids``.

    Attributes:
        logprobs: Natural logarithms of the raw distribution, before penalties and temperature.
        ranks: Rank of the token by probability; the most likely token of the vocabulary has rank 1.
        tokens: Text of each entry. Empty until the frontend fills this array.
    """

    offsets: list[int] = msgspec.field(default_factory=lambda: [0])
    token_ids: list[int] = []
    logprobs: list[float] = []
    ranks: list[int] = []
    tokens: list[str] = []

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def add(self, token_ids: list[int], logprobs: list[float], ranks: list[int]) -> None:
        """Append one position, whose entries have these values."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.ranks += ranks
        self.offsets.append(len(self.token_ids))

    def extend(self, other: "Logprobs") -> None:
        """Append the log-probabilities of the positions of ``other``."""
        base = len(self.token_ids)
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.ranks += other.ranks
        self.tokens += other.tokens
        self.offsets += [base + offset for offset in other.offsets[1:]]

    def slice(self, start: int, stop: int) -> "Logprobs":
        """Return a copy of positions ``start`` to ``stop``."""
        first, last = self.offsets[start], self.offsets[stop]
        return Logprobs(
            offsets=[offset - first for offset in self.offsets[start : stop + 1]],
            token_ids=self.token_ids[first:last],
            logprobs=self.logprobs[first:last],
            ranks=self.ranks[first:last],
            tokens=self.tokens[first:last],
        )


# Columns for outputs that contain only new tokens. Most outputs of a step are of this kind.

UINT32 = "I"
"""``array`` type code of the numbers in columns: unsigned, 4 bytes."""

NewTokens: TypeAlias = tuple[str, list[int]]
"""A request ID and its new tokens."""


def column() -> "array[int]":
    """Return an empty array for the numbers of a column."""
    return array(UINT32)


class TokenColumns(msgspec.Struct, kw_only=True):
    """New tokens of many requests, with one row per output.

    Attributes:
        request_numbers: Number of each row's request on the session.
        offsets: Index of each row's first new token in the output of its request.
        counts: Number of new tokens of each row. Empty if every row has one token.
        token_ids: Tokens of all rows, concatenated.
        drafts: Number of drafted tokens that were verified for each row. All tokens of the row except the last are
            accepted drafts. Empty if there were no drafts.
    """

    request_numbers: "array[int]" = msgspec.field(default_factory=column)
    offsets: "array[int]" = msgspec.field(default_factory=column)
    counts: "array[int]" = msgspec.field(default_factory=column)
    token_ids: "array[int]" = msgspec.field(default_factory=column)
    drafts: "array[int]" = msgspec.field(default_factory=column)

    def __len__(self) -> int:
        return len(self.request_numbers)

    def add(self, request_number: int, offset: int, token_ids: Sequence[int], num_drafts: int = 0) -> None:
        """Append a row. If a token ID does not fit into 32 bits, raise OverflowError without a change.

        This method is called for each output, so it must be fast.
        """
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
        """Return request number, offset and new tokens of each row. The code is fast, because it runs for each output."""
        if not self.counts:
            return zip(self.request_numbers, self.offsets, ([token_id] for token_id in self.token_ids), strict=True)
        return self._counted_rows()

    def _counted_rows(self) -> Iterable[tuple[int, int, list[int]]]:
        all_token_ids, start = self.token_ids.tolist(), 0
        for number, offset, count in zip(self.request_numbers, self.offsets, self.counts, strict=True):
            yield number, offset, all_token_ids[start : start + count]
            start += count

    def drafted(self) -> Iterator[tuple[int, int, int]]:
        """Yield request number, number of drafted tokens and number of accepted drafts of each row with drafts."""
        counts = self.counts or repeat(1)
        for number, num_drafts, count in zip(self.request_numbers, self.drafts, counts, strict=False):
            if num_drafts:
                yield number, num_drafts, min(count - 1, num_drafts)

    def cut(self, num_rows: int) -> "list[TokenColumns]":
        """Split the rows into several ``TokenColumns`` of up to ``num_rows`` rows each."""
        pieces = [TokenColumns()]
        for row, num_drafts in zip(self.rows(), self.drafts or repeat(0), strict=False):
            if len(pieces[-1]) == num_rows:
                pieces.append(TokenColumns())
            pieces[-1].add(*row, num_drafts)
        return pieces


class FinishReason(enum.IntEnum):
    """Reason for the end of a request. Values equal ``penstock.common.v1.FinishReason``.

    ERROR is a retryable internal error. The client gets the error UNAVAILABLE or INTERNAL, never a normal end. HANDOFF
    means that the request resumes on another engine. Clients never receive HANDOFF.
    """

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    REPETITION = 5
    HANDOFF = 6


class EventType(enum.IntEnum):
    """Type of a request event. Values equal ``penstock.common.v1.EngineCoreEventType``."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct, frozen=True):
    """Event of a request. ``timestamp`` is the time of the engine's monotonic clock in seconds.

    Timestamps are comparable only within one process.
    """

    type: EventType
    timestamp: float


class RequestError(msgspec.Struct, frozen=True, kw_only=True):
    """Reason why the engine ended a request without a normal end (FinishReason.ERROR, or ABORT after a timeout).

    Attributes:
        code: Name of a gRPC status code.
        field: Request field that caused the error, or empty.
        reason: A stable identifier in UPPER_SNAKE_CASE.
        retry_after: Seconds after which a retry may succeed, or None.
        quota_subject: Owner of the exhausted quota, or empty.
    """

    code: str
    message: str
    field: str = ""
    reason: str = ""
    retry_after: float | None = None
    quota_subject: str = ""

    @classmethod
    def from_exception(cls, error: RequestFailed) -> "RequestError":
        """Return the exception as a struct that can be sent."""
        return cls(**{name: getattr(error, name) for name in cls.__struct_fields__})

    def to_exception(self) -> RequestFailed:
        """Return the exception for this error. An unknown code becomes Internal."""
        failed = request_failed(self.code, self.message, field=self.field, reason=self.reason)
        failed.retry_after, failed.quota_subject = self.retry_after, self.quota_subject
        return failed


class PrefillStats(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of prompt tokens, by the source of their KV. Sent once, with the first output of an attempt."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_host_tokens: int = 0
    """Number of cached tokens from the engine's host memory. The next two fields are the numbers of cached tokens from
    disk and from another engine.
    """
    num_disk_tokens: int = 0
    num_peer_tokens: int = 0


class SpecDecodingStats(msgspec.Struct, kw_only=True):
    """Draft statistics of an engine or of a request. Counts only grow.

    Attributes:
        num_drafts: Number of times that a request had drafts in a step.
        num_accepted_tokens_per_pos: Accepted tokens by position in the draft.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Add a draft of ``num_drafted`` tokens, of which the first ``num_accepted`` were accepted."""
        per_pos = self.num_accepted_tokens_per_pos
        per_pos.extend([0] * (num_drafted - len(per_pos)))
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            per_pos[place] += 1

    def copy(self) -> "SpecDecodingStats":
        """Return a copy of these statistics."""
        return msgspec.structs.replace(self, num_accepted_tokens_per_pos=[*self.num_accepted_tokens_per_pos])


Drafts: TypeAlias = tuple[str, SpecDecodingStats]
"""A request ID and the statistics of its drafts."""


class EngineCoreOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New tokens of one request. ``offset`` is the index of the first new token in the request's output.

    ``new_logprobs`` belong to ``new_token_ids``. ``new_prompt_logprobs`` belong to the prompt tokens that were computed
    since the last output. The first prompt token has no log-probability.
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
    """Draft statistics of the attempt so far. Set on the attempt's last output and on outputs of steps that verified
    drafts. None on the last output means that no tokens were drafted.
    """
    kv_source: KvSource | None = None
    """Engine that keeps the request's KV blocks. Set only on the last output."""
    kv_params: str = ""
    """Data of a plugin's KV connector as a JSON object, or empty. Set only on the last output."""


class LoraStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of an engine's LoRA adapters.

    The counts of loads, evictions and requests, and ``load_seconds``, only grow.

    Attributes:
        active: Names of the adapters of running requests.
        waiting: Names of adapters that wait for a slot, at most ``MAX_WAITING_NAMES``.
        num_found: Number of requests whose adapter was in memory when the frontend received the request.
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
    """Adapters in the engine's memory. None means that the adapters have not changed since the last report on this
    stream.
    """


MAX_WAITING_NAMES = 32


class MediaStats(msgspec.Struct, frozen=True, kw_only=True):
    """Media statistics of an engine's requests.

    Attributes:
        pending_embeds: Number of embeddings that the engine must still compute for running and waiting requests.
        encoded_embeds: Number of embeddings that the engine has computed. Only grows.
        encoder_cache_queries: Number of media items looked up in the encoder cache. Only grows.
        encoder_cache_hits: Number of looked-up media items that were in the encoder cache. Only grows.
        encoder_cache_usage: Used fraction of the encoder cache, in [0, 1].
        receiver_cache_bytes: Size in bytes of the media features in host memory.
        num_waiting_reqs: Number of requests that wait only for their media to be encoded.
    """

    pending_embeds: int = 0
    encoded_embeds: int = 0
    encoder_cache_queries: int = 0
    encoder_cache_hits: int = 0
    encoder_cache_usage: float = 0.0
    receiver_cache_bytes: int = 0
    num_waiting_reqs: int = 0


class KvTransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of blocks that an engine loads from tiers or other engines, and of blocks that it keeps for other
    engines.

    Attributes:
        external_prefix_cache_queries: Number of prompt tokens that were not in the KV cache, and were looked up in
            tiers or other engines. Only grows.
        external_prefix_cache_hits: Number of looked-up prompt tokens whose blocks were loaded. Only grows.
    """

    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    num_leases: int = 0
    num_leased_blocks: int = 0
    leased_bytes: int = 0


class StateStats(msgspec.Struct, frozen=True, kw_only=True):
    """Use of the slots for states of recurrent layers.

    Attributes:
        num_slots: Number of slots in the pool.
        num_used_slots: Number of slots that running requests own or read.
        num_kept: Number of slots with a state that the prefix cache keeps.
        num_evictions: Number of states that the prefix cache has evicted. Only grows.
        num_recomputed_tokens: Number of prompt tokens that had cached keys and values but no state, and were
            recomputed. Only grows.
        max_running_reqs: Maximum number of running requests that the pool allows.
    """

    num_slots: int = 0
    num_used_slots: int = 0
    num_kept: int = 0
    num_evictions: int = 0
    num_recomputed_tokens: int = 0
    max_running_reqs: int = 0


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's load after a step. Counters only grow. ``kv_cache_usage`` is a fraction in [0, 1].

    ``prefix_cache_queries`` and ``prefix_cache_hits`` count tokens. ``seconds_since_last_step`` is 0 while idle.
    ``wedged`` means that the engine has work but completed no step for too long.
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
    """Draft statistics, or None if the engine does not use speculative decoding."""
    lora: LoraStats | None = None
    """Adapter statistics, or None if the engine supports no adapters."""
    media: MediaStats | None = None
    """Media statistics, or None if the engine supports no media."""
    kv_transfer: KvTransferStats | None = None
    """Statistics of KV blocks that the engine loads, or keeps for other engines. None if the engine neither loads
    blocks nor keeps blocks for other engines.
    """
    states: StateStats | None = None
    """Use of the slots for recurrent states, or None if the model has no recurrent layers."""

    def without_held(self) -> "SchedulerStats":
        """Return the statistics without the list of adapters in memory, for receivers that already have this list."""
        if self.lora is None or self.lora.held is None:
            return self
        return msgspec.structs.replace(self, lora=msgspec.structs.replace(self.lora, held=None))

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Fraction of looked-up prompt tokens that were in the prefix cache. 0 before the first lookup."""
        return self.prefix_cache_hits / max(self.prefix_cache_queries, 1)


class UtilityOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a utility call: a msgpack ``result``, or ``error`` with the name of a gRPC status code."""

    call_id: int
    result: bytes = b""
    error: RequestError | None = None


class EngineCoreOutputs(msgspec.Struct, kw_only=True):
    """Outputs of one step for one frontend. ``timestamp`` is the time of the engine's monotonic clock in seconds.

    If ``tokens`` and ``outputs`` have entries of the same request, the tokens in ``tokens`` are the earlier tokens.
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
    """An engine's limits for LoRA adapters: number of adapters of running requests, rank, and bytes of host memory."""

    max_loras: int
    max_lora_rank: int
    cpu_memory: int


class EngineReady(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of an engine on a session: its identity and its limits. All lengths are numbers of tokens.

    Attributes:
        hidden_size: Number of dimensions of a prompt embedding. 0 if not supported, None if unknown.
        embedding_size: Number of dimensions of an output embedding. 0 if not supported, None if unknown.
        config: Settings that can change output tokens, by name. Empty if unknown.
        config_hash: Hash of ``config``. Empty if unknown.
        max_message_bytes: Maximum size in bytes of a message that the engine accepts. 0 if unknown.
        max_tensor_bytes: Maximum number of bytes of chunked tensors that the engine buffers. 0 if unknown.
        max_num_seqs: Maximum number of running requests. 0 if unknown.
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
    """Limits for adapters, or None if the engine supports no adapters."""
    receiver_cache_bytes: int = 0
    """Bytes of media features that the engine caches for a session. 0 means that each request must include its
    features.
    """
    shared_memory_id: str = ""
    """ID of the shared memory into which frontends may write tensors for the engine. Empty if not supported."""
    media: tuple[MediaLimits, ...] = ()
    """Limits for media, with one entry per supported modality."""
    encoder_cache_size: int = 0
    """Maximum number of media embeddings in the engine's cache. 0 if the engine accepts no media."""
    role: EngineRole = EngineRole.BOTH
    kv_address: str = ""
    """Address from which other engines fetch this engine's blocks. Empty if the engine does not provide blocks."""
    kv_fingerprint: bytes = b""
    """Fingerprint of the engine's blocks. Engines with equal fingerprints can transfer blocks to each other. Empty if
    the engine cannot transfer blocks.
    """
    shared_memory_nonce: bytes = b""
    """Content that the engine has read from the frontend's probe in shared memory, or empty.

    If the content is correct, the frontend may write tensors of all kinds into shared memory.
    """
