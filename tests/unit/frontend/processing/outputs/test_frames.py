"""Frames of several tokens: the client's result does not depend on the number of tokens in an engine's frame."""

import time
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from penstock_common.types.outputs import EngineCoreOutput, FinishReason, Logprobs, SpecDecodingStats, TokenColumns
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import OutputKind, SamplingParams
from penstock_frontend.call_types import Finish, RequestOutput
from penstock_frontend.dispatch.journal import Journal
from penstock_frontend.metrics import FrontendMetrics
from penstock_frontend.processing.outputs.collector import OutputCollector
from penstock_frontend.processing.outputs.processor import OutputProcessor
from penstock_frontend.processing.prompts.tokenizer import Tokenizer
from tests.fakes.models import small_tokenizers

TOKENIZER = Tokenizer(small_tokenizers.byte_level())
ALPHABET = "abcé你🙂 \n"
PROMPT = [1, 2, 3]


class Frame(NamedTuple):
    """Tokens that an engine sends at once.

    Attributes:
        moves: Whether the engine is lost after the frame.
        repeated: Number of tokens of the previous frame that the engine sends again.
    """

    size: int
    moves: bool = False
    repeated: int = 0


SINGLE = [Frame(1)] * 200


class Read(NamedTuple):
    """A client's result: its messages, and their joined contents."""

    messages: list[RequestOutput]
    text: str
    token_ids: list[int]
    logprobs: list[tuple[int, float]]
    finish: Finish | None
    counted: float
    """Output tokens, by the metrics."""


def ids_of(text: str) -> list[int]:
    return TOKENIZER._backend.encode(text, add_special_tokens=False).ids


def logprobs_of(token_ids: list[int], offset: int) -> Logprobs:
    new = Logprobs(token_ids=[], logprobs=[], ranks=[])
    for index, token_id in enumerate(token_ids, start=offset):
        new.add([token_id], [-float(index)], [1])
    return new


def serve(ids: list[int], frames: list[Frame], params: SamplingParams, reason: FinishReason) -> Read:
    """Send ``ids`` in ``frames``, the last one with ``reason``. The client reads all pending output after each frame."""
    metrics = FrontendMetrics("demo")
    processor = OutputProcessor(TOKENIZER, metrics)
    journal = Journal(time.monotonic, on_left=lambda engine, request_id: None)
    request = EngineCoreRequest(request_id="r", prompt_token_ids=PROMPT, sampling_params=params)
    [state], [entry] = processor.add(request), journal.begin([request])
    journal.assign(entry, "engine-0")
    messages: list[RequestOutput] = []
    at, attempt = 0, 0
    for frame in frames:
        if at >= len(ids) or state.finish is not None:
            break
        start = max(at - frame.repeated, 0)
        new = ids[start : at + frame.size]
        at = min(at + frame.size, len(ids))
        last = at == len(ids)
        with_logprobs = params.logprobs is not None
        outputs, columns = [], None
        if last or with_logprobs:
            output = EngineCoreOutput(request_id="r", attempt=attempt, offset=start, new_token_ids=new)
            output.new_logprobs = logprobs_of(new, start) if with_logprobs else None
            output.finish_reason = reason if last else None
            outputs = [output]
        else:
            columns = TokenColumns()
            columns.add(entry.number, start, new)
        accepted = journal.accept(entry.engine, outputs, columns)
        assert accepted.fault is None
        processor.process(accepted.outputs, entry.engine, 1.0, accepted.tokens, accepted.drafts)
        while state.collector.ready:
            messages.append(_taken(state.collector))
        if frame.moves and not last and state.finish is None:
            delivered = [token for message in messages for token in message.token_ids]
            journal.leave(entry)
            attempt += 1
            journal.assign(entry, f"engine-{attempt}")
            assert entry.to_send().prior_output_token_ids == ids[:at]
            assert params.output_kind is not OutputKind.DELTA or ids[: len(delivered)] == delivered
    assert state.finish is not None
    return _read(messages, params.output_kind, metrics)


def _taken(collector: OutputCollector) -> RequestOutput:
    """Take the pending output without an event loop, so nothing can wait."""
    try:
        collector.get().send(None)
    except StopIteration as e:
        output: RequestOutput = e.value
        return output
    raise AssertionError("the collector waits")


def _read(messages: list[RequestOutput], kind: OutputKind, metrics: FrontendMetrics) -> Read:
    parts = messages[-1:] if kind is OutputKind.CUMULATIVE else messages
    logprobs = [
        entry
        for part in parts
        if part.logprobs is not None
        for entry in zip(part.logprobs.token_ids, part.logprobs.logprobs, strict=True)
    ]
    token_ids = [token_id for part in parts for token_id in part.token_ids]
    samples = (sample for family in metrics.registry.collect() for sample in family.samples)
    return Read(
        messages,
        "".join(part.text for part in parts),
        token_ids,
        logprobs,
        messages[-1].finish,
        sum(sample.value for sample in samples if sample.name == "vllm:generation_tokens_total"),
    )


FRAMES = st.lists(st.builds(Frame, st.integers(1, 9), st.booleans(), st.integers(0, 4)), min_size=1, max_size=40).map(
    lambda frames: [*frames, *SINGLE]
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], SamplingParams, FinishReason]:
    """Outputs whose stop strings are mostly pieces of them, so that they end within frames."""
    text = draw(st.text(alphabet=ALPHABET, min_size=1, max_size=40))
    pieces = st.builds(lambda at, n: text[at : at + n], st.integers(0, len(text) - 1), st.integers(1, 5))
    stops = draw(st.lists(pieces, max_size=3))
    params = SamplingParams(
        stop=tuple(stops),
        include_stop_str_in_output=draw(st.booleans()),
        min_tokens=draw(st.integers(0, 6)),
        logprobs=draw(st.sampled_from([None, 0])),
        output_kind=draw(st.sampled_from(OutputKind)),
        stream_interval=draw(st.sampled_from([1, 2, 5])),
        detokenize=bool(stops) or draw(st.booleans()),
    )
    reason = draw(st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]))
    return ids_of(text), params, reason


@given(case=requests(), frames=FRAMES)
def test_frames_of_any_size_come_to_what_single_tokens_do(
    case: tuple[list[int], SamplingParams, FinishReason], frames: list[Frame]
) -> None:
    single, at_once = serve(case[0], SINGLE, *case[1:]), serve(case[0], frames, *case[1:])
    assert at_once[1:] == single[1:]


@given(frames=FRAMES, interval=st.integers(1, 7), length=st.integers(1, 40))
def test_a_message_has_at_least_an_interval_of_tokens_and_the_rest_of_a_frame(
    frames: list[Frame], interval: int, length: int
) -> None:
    params = SamplingParams(stream_interval=interval)
    messages = serve(ids_of("a" * length)[:length], frames, params, FinishReason.LENGTH).messages
    largest = max(frame.size for frame in frames)
    for message in messages[1:-1]:
        assert interval <= len(message.token_ids) < interval + largest


def test_what_is_behind_a_stop_string_in_a_frame_is_neither_shown_nor_counted() -> None:
    read = serve(ids_of("abcdef"), [Frame(2), Frame(4)], SamplingParams(stop=("d",)), FinishReason.LENGTH)
    assert (read.text, read.token_ids) == ("abc", ids_of("abc"))
    assert read.finish is not None
    assert (read.finish.reason, read.finish.stop_reason) == (FinishReason.STOP, "d")
    assert read.finish.usage.completion_tokens == len(ids_of("abcd")) == read.counted


def test_an_included_stop_string_keeps_the_tokens_that_complete_it() -> None:
    params = SamplingParams(stop=("cd",), include_stop_str_in_output=True)
    read = serve(ids_of("abcdef"), [Frame(6)], params, FinishReason.LENGTH)
    assert (read.text, read.token_ids) == ("abcd", ids_of("abcd"))


async def test_usage_adds_what_every_attempt_has_said_of_its_drafts() -> None:
    processor, journal = OutputProcessor(TOKENIZER, FrontendMetrics("demo")), _journal()
    request = EngineCoreRequest(request_id="r", prompt_token_ids=PROMPT, sampling_params=SamplingParams())
    [state], [entry] = processor.add(request), journal.begin([request])
    journal.assign(entry, "first")
    first = _output(
        ids_of("abc"),
        finish_reason=FinishReason.ABORT,
        spec_decoding_stats=SpecDecodingStats(
            num_drafts=2, num_draft_tokens=5, num_accepted_tokens=2, num_accepted_tokens_per_pos=[1, 1, 0]
        ),
    )
    tokens = TokenColumns()
    tokens.add(entry.number, 0, ids_of("abc"))
    accepted = journal.accept("first", [first], tokens)
    assert [refusal.entry for refusal in accepted.refusals] == [entry]
    processor.process(accepted.outputs, "first", 1.0, accepted.tokens)
    journal.leave(entry)
    journal.assign(entry, "second")
    last = _output(
        ids_of("de"),
        attempt=1,
        offset=3,
        finish_reason=FinishReason.LENGTH,
        spec_decoding_stats=SpecDecodingStats(
            num_drafts=1, num_draft_tokens=4, num_accepted_tokens=1, num_accepted_tokens_per_pos=[1, 0, 0, 0]
        ),
    )
    accepted = journal.accept("second", [last])
    [written] = accepted.outputs
    assert written.spec_decoding_stats == SpecDecodingStats(
        num_drafts=3, num_draft_tokens=9, num_accepted_tokens=3, num_accepted_tokens_per_pos=[2, 1, 0, 0]
    )
    processor.process(accepted.outputs, "second", 2.0)
    output = await state.collector.get()
    assert output.finish is not None
    usage = output.finish.usage
    assert (usage.completion_tokens, usage.accepted_draft_tokens, usage.rejected_draft_tokens) == (5, 3, 6)


async def test_drafts_behind_a_stop_string_are_no_accepted_tokens() -> None:
    processor = OutputProcessor(TOKENIZER, FrontendMetrics("demo"))
    params = SamplingParams(stop=("b",))
    [state] = processor.add(EngineCoreRequest(request_id="r", prompt_token_ids=PROMPT, sampling_params=params))
    stats = SpecDecodingStats(num_drafts=1, num_draft_tokens=5, num_accepted_tokens=4)
    last = _output(ids_of("abcde"), finish_reason=FinishReason.LENGTH, spec_decoding_stats=stats)
    processor.process([last])
    output = await state.collector.get()
    assert output.finish is not None
    usage = output.finish.usage
    assert (usage.completion_tokens, usage.accepted_draft_tokens, usage.rejected_draft_tokens) == (2, 2, 1)


def _drafts(num_drafts: int, num_accepted: int) -> SpecDecodingStats:
    stats = SpecDecodingStats()
    stats.count(num_drafts, num_accepted)
    return stats


class Drafted:
    """A sequence whose frames ``say`` sends. Each frame has one step with drafts."""

    def __init__(self, **params: Any) -> None:
        self.processor, self.journal = OutputProcessor(TOKENIZER, FrontendMetrics("demo")), _journal()
        request = EngineCoreRequest(
            request_id="r", prompt_token_ids=PROMPT, sampling_params=SamplingParams(max_tokens=50, **params)
        )
        [self.state], [self.entry] = self.processor.add(request), self.journal.begin([request])
        self.journal.assign(self.entry, "first")

    def say(self, text: str, num_drafts: int, so_far: SpecDecodingStats | None = None) -> list[str]:
        """Send the text in columns, or as an output with ``so_far`` drafts of its attempt. Returns the requests to
        abort.
        """
        tokens, outputs, start = TokenColumns(), [], len(self.entry.token_ids)
        if so_far is None:
            tokens.add(self.entry.number, start, ids_of(text), num_drafts)
        else:
            outputs = [_output(ids_of(text), offset=start, attempt=self.entry.attempt, spec_decoding_stats=so_far)]
        accepted = self.journal.accept(self.entry.engine, outputs, tokens)
        return self.processor.process(accepted.outputs, "first", 1.0, accepted.tokens, accepted.drafts)

    @property
    def counts(self) -> tuple[int, int]:
        """Return the accepted and rejected drafts of the ended sequence."""
        assert self.state.finish is not None
        usage = self.state.finish.usage
        return usage.accepted_draft_tokens, usage.rejected_draft_tokens


def test_a_sequence_that_ends_at_a_stop_string_has_the_counts_of_its_drafts() -> None:
    drafted = Drafted(stop=("e",))
    assert drafted.say("ab", 5) == []
    assert drafted.say("c", 3) == []
    assert drafted.say("de", 4) == ["r"]
    assert drafted.counts == (2, 10)


def test_a_sequence_that_a_client_ends_has_the_counts_of_its_drafts_so_far() -> None:
    drafted = Drafted()
    drafted.say("ab", 5)
    assert drafted.processor.abort(drafted.state)
    assert drafted.counts == (1, 4)


def test_a_sequence_without_drafts_has_no_counts_at_its_stop_string() -> None:
    drafted = Drafted(stop=("b",))
    assert drafted.say("ab", 0) == ["r"]
    assert drafted.counts == (0, 0)


def test_outputs_say_what_came_of_drafts_until_then() -> None:
    drafted = Drafted(stop=("e",))
    drafted.say("ab", 5, _drafts(5, 1))
    so_far = _drafts(5, 1)
    so_far.count(4, 1)
    drafted.say("ce", 4, so_far)
    assert drafted.counts == (2, 7)


def test_drafts_of_an_engine_that_was_lost_count_as_far_as_it_told_of_them() -> None:
    drafted = Drafted(stop=("e",))
    drafted.say("ab", 5)
    assert drafted.journal.lose("first") == [drafted.entry]
    drafted.journal.leave(drafted.entry)
    drafted.journal.assign(drafted.entry, "second")
    drafted.say("c", 2)
    drafted.say("de", 1, _drafts(2, 0))
    assert drafted.counts == (1, 6)


def _journal() -> Journal:
    return Journal(time.monotonic, on_left=lambda engine, request_id: None)


def _output(tokens: list[int], **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id="r", new_token_ids=tokens, **{"offset": 0, **fields})
