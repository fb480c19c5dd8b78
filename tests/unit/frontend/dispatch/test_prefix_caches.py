"""Prompts looked up in the frontend's copy of engines' caches. Hashes are those of engines, and all cache events are
applied.
"""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock_common.errors import Internal
from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.kv_transfer import AllBlocksCleared, BlockRemoved, BlockStored, KvCacheEvent, KvMedium
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import EngineCoreRequest, PoolingParams, RequestContext
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.kv_cache.manager import KVCacheManager
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup
from penstock_enginecore.core.request import Request
from penstock_frontend.dispatch import prefix_caches
from penstock_frontend.dispatch.prefix_caches import BlockPlaces, PrefixCaches, PrefixIndex, with_media
from tests.fakes.systems.media_session import item

SIZE = 4
PROMPT = list(range(100, 118))
EMBEDS = PromptEmbeds(dtype="float16", num_tokens=9, hidden_size=2, data=bytearray(range(36)))
MIXED = PromptEmbeds(
    dtype="float32",
    num_tokens=12,
    hidden_size=1,
    data=bytearray(range(24)),
    is_token=bytes([0, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0, 0]),
)


def asked(
    prompt: list[int], *, salt: str = "", embeds: PromptEmbeds | None = None, lora: LoraAdapter | None = None
) -> EngineCoreRequest:
    params = SamplingParams(temperature=0.0, max_tokens=9)
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=prompt,
        prompt_embeds=embeds,
        lora=lora,
        sampling_params=params,
        context=RequestContext(cache_salt=salt),
    )


class Engine:
    """The KV cache of an engine, without the rest."""

    def __init__(self, num_blocks: int = 40, block_size: int = SIZE) -> None:
        config = KVCacheConfig(
            num_blocks=num_blocks, block_size=block_size, groups=(KVCacheGroup(layer_names=("a",)),), max_model_len=200
        )
        self.manager = KVCacheManager(config, enable_prefix_caching=True, enable_kv_events=True)

    def request(self, request: EngineCoreRequest) -> Request:
        if request.prompt_embeds is not None and not request.prompt_token_ids:
            request = msgspec.structs.replace(request, prompt_token_ids=[0] * request.prompt_embeds.num_tokens)
        return Request(request, client_id="c", max_model_len=200)

    def cached(self, request: EngineCoreRequest) -> int:
        """Return the number of tokens that the engine does not need to compute."""
        return self.manager.get_computed_blocks(self.request(request)).num_tokens

    def compute(self, asked: EngineCoreRequest) -> list[KvCacheEvent]:
        """Compute a prompt. Returns the cache events."""
        request = self.request(asked)
        found = self.manager.get_computed_blocks(request)
        assert self.manager.admit(request, found, request.num_tokens - found.num_tokens, reserve=0)
        request.num_computed_tokens = request.num_processed_tokens = request.num_tokens
        self.manager.cache_blocks(request)
        self.manager.free(request)
        return self.manager.take_events()

    def state(self, num_parts: int = 1) -> bytes:
        return b"".join(b"".join(self.manager.cached_blocks(part, num_parts)) for part in range(num_parts))


def following(*engines: str, block_size: int = SIZE) -> PrefixCaches:
    caches = PrefixCaches(10_000)
    for engine in engines:
        caches.begin(engine, block_size)
        caches.settle(engine, {})
    return caches


@pytest.mark.parametrize(
    "request_",
    [
        asked(PROMPT),
        asked(PROMPT[:16]),
        asked(PROMPT, salt="tenant"),
        asked([], embeds=EMBEDS),
        asked([7] * 12, embeds=MIXED),
        asked(PROMPT[:3]),
    ],
    ids=["text", "whole blocks", "salt", "vectors", "mixed", "less than a block"],
)
def test_a_frontend_finds_what_the_engine_finds(request_: EngineCoreRequest) -> None:
    engine, caches = Engine(), following("e")
    assert caches.cached_tokens(request_) == {}
    caches.apply("e", engine.compute(request_))
    cached = engine.cached(request_)
    assert caches.cached_tokens(request_) == ({"e": cached} if cached else {})
    assert cached >= len(request_.prompt_token_ids) - SIZE


def test_salts_are_kept_apart() -> None:
    engine, caches = Engine(), following("e")
    caches.apply("e", engine.compute(asked(PROMPT, salt="a")))
    assert caches.cached_tokens(asked(PROMPT, salt="b")) == caches.cached_tokens(asked(PROMPT)) == {}


def test_cached_blocks_of_an_adapter_do_not_match_other_adapters_or_the_model() -> None:
    ours, renamed, other = (LoraAdapter(*said) for said in (("a", "/a", b"1"), ("b", "/b", b"1"), ("a", "/a", b"2")))
    engine, caches = Engine(), PrefixCaches(100)
    caches.begin("e", SIZE)
    caches.settle("e", {})
    caches.apply("e", engine.compute(asked(PROMPT, lora=ours)))
    assert (
        caches.cached_tokens(asked(PROMPT, lora=ours)) == caches.cached_tokens(asked(PROMPT, lora=renamed)) == {"e": 16}
    )
    assert caches.cached_tokens(asked(PROMPT, lora=other)) == caches.cached_tokens(asked(PROMPT)) == {}


def test_the_output_that_a_request_goes_on_from_counts_as_the_prompt_does() -> None:
    engine, caches = Engine(), following("e")
    caches.apply("e", engine.compute(asked(PROMPT)))
    assert caches.cached_tokens(asked(PROMPT[:5]), PROMPT[5:13]) == {"e": 12}


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling_params": SamplingParams(skip_reading_prefix_cache=True)},
        {"sampling_params": SamplingParams(prompt_logprobs=1)},
        {"pooling_params": PoolingParams(task="embed")},
    ],
    ids=["asked for", "prompt_logprobs", "pooling"],
)
def test_a_request_that_does_not_read_the_cache_is_not_looked_up(changes: dict[str, object]) -> None:
    engine, caches = Engine(), following("e")
    caches.apply("e", engine.compute(asked(PROMPT)))
    skipping = msgspec.structs.replace(asked(PROMPT), **changes)
    assert engine.cached(skipping) == 0
    assert caches.cached_tokens(skipping) == {}
    assert caches.cached_tokens(asked(PROMPT)) == {"e": 16}


def test_engines_with_blocks_of_different_sizes_are_looked_up_alike() -> None:
    small, large, caches = Engine(block_size=2), Engine(block_size=8), following("small", block_size=2)
    caches.begin("large", 8)
    caches.apply("small", small.compute(asked(PROMPT[:7])))
    caches.apply("large", large.compute(asked(PROMPT)))
    assert caches.cached_tokens(asked(PROMPT)) == {"small": 6, "large": 16}


def test_nothing_is_known_of_an_engine_that_is_gone_or_has_begun_again() -> None:
    engine, caches = Engine(), following("e", "f")
    events = engine.compute(asked(PROMPT))
    caches.apply("e", events)
    caches.apply("f", events)
    caches.gone("e")
    assert caches.cached_tokens(asked(PROMPT)) == {"f": 16}
    caches.apply("e", events)
    assert caches.cached_tokens(asked(PROMPT)) == {"f": 16}, "nobody follows it"
    caches.begin("f", SIZE)
    assert caches.num_blocks == 0


def test_what_an_engine_had_before_the_session_is_learned_from_its_answer() -> None:
    engine, caches = Engine(), PrefixCaches(10_000)
    engine.compute(asked(PROMPT))
    caches.begin("e", SIZE)
    caches.settle("e", {KvMedium.DEVICE: engine.state()})
    assert caches.cached_tokens(asked(PROMPT)) == {"e": 16}


def test_an_engine_that_does_not_answer_is_followed_from_then_on() -> None:
    engine, caches = Engine(), PrefixCaches(10_000)
    caches.begin("e", SIZE)
    caches.apply("e", engine.compute(asked(PROMPT)))
    caches.settle("e", None)
    assert caches.cached_tokens(asked(PROMPT)) == {"e": 16}


def test_an_answer_that_has_no_whole_digests_is_refused() -> None:
    caches = PrefixCaches(10_000)
    caches.begin("e", SIZE)
    with pytest.raises(Internal, match="17 bytes; expected a multiple of 16"):
        caches.settle("e", {KvMedium.HOST: bytes(17)})


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), max_size=14),
    clears=st.sets(st.integers(0, 13), max_size=2),
    begun=st.integers(0, 14),
    parts=st.lists(st.integers(0, 14), min_size=1, max_size=3),
    settled=st.integers(0, 14),
)
def test_the_answer_may_be_of_any_moment_and_its_parts_of_different_ones(
    prompts: list[list[int]], clears: set[int], begun: int, parts: list[int], settled: int
) -> None:
    engine, caches = Engine(num_blocks=12), PrefixCaches(10_000)
    moments = sorted(min(max(moment, begun), len(prompts)) for moment in parts)
    settled = min(max(settled, moments[-1]), len(prompts))
    answers: list[bytes] = []
    for moment in itertools.count():
        if moment == min(begun, len(prompts)):
            caches.begin("e", SIZE)
        for part, when in enumerate(moments):
            if when == moment:
                answers.append(b"".join(engine.manager.cached_blocks(part, len(moments))))
        if moment == settled:
            caches.settle("e", {KvMedium.DEVICE: b"".join(answers)})
        if moment == len(prompts):
            break
        if moment in clears:
            assert engine.manager.reset_prefix_cache()
        caches.apply("e", engine.compute(asked(prompts[moment])))
    assert caches.num_on("e") == len(engine.state()) // 16
    for prompt in prompts:
        assert caches.cached_tokens(asked(prompt)).get("e", 0) == engine.cached(asked(prompt))


def kept(medium: KvMedium, block_hashes: list[bytes]) -> BlockStored:
    return BlockStored(block_hashes=block_hashes, parent_hash=b"", token_ids=[], block_size=SIZE, medium=medium)


def test_what_an_engine_has_outside_its_kv_cache_counts_until_it_is_nowhere() -> None:
    engine, caches = Engine(), following("e")
    (stored,) = engine.compute(asked(PROMPT))
    hashes = stored.block_hashes
    caches.apply("e", [stored, kept(KvMedium.HOST, hashes[::-1]), BlockRemoved(block_hashes=hashes)])
    assert caches.cached_tokens(asked(PROMPT)) == {"e": 16}
    caches.apply("e", [kept(KvMedium.DISK, hashes[:2]), BlockRemoved(block_hashes=hashes, medium=KvMedium.HOST)])
    assert caches.cached_tokens(asked(PROMPT)) == {"e": 8}
    caches.apply("e", [stored, BlockRemoved(block_hashes=hashes[:2], medium=KvMedium.DISK)])
    assert caches.cached_tokens(asked(PROMPT)) == {"e": 16}
    caches.apply("e", [BlockRemoved(block_hashes=hashes)])
    assert caches.num_blocks == 0


def test_an_answer_tells_of_all_media() -> None:
    engine, caches = Engine(), PrefixCaches(10_000)
    (stored,) = engine.compute(asked(PROMPT))
    first, *rest = stored.block_hashes
    caches.begin("e", SIZE)
    caches.apply("e", [BlockRemoved(block_hashes=[rest[-1]], medium=KvMedium.DISK)])
    caches.settle("e", {KvMedium.DEVICE: first, KvMedium.HOST: first + rest[0], KvMedium.DISK: b"".join(rest)})
    assert caches.cached_tokens(asked(PROMPT)) == {"e": 12}
    caches.apply("e", [BlockRemoved(block_hashes=[first])])
    assert caches.cached_tokens(asked(PROMPT)) == {"e": 12}
    caches.apply("e", [AllBlocksCleared(), kept(KvMedium.DISK, [first])])
    assert caches.cached_tokens(asked(PROMPT)) == {"e": 4}


def state(block_hashes: list[bytes]) -> BlockStored:
    return kept(KvMedium.STATE, block_hashes)


def test_a_prefix_of_a_recurrent_model_counts_up_to_its_last_state() -> None:
    caches, hashes = PrefixCaches(max_blocks=100), blocks_of_prompt()
    caches.begin("e", SIZE, has_states=True)
    device = b"".join(hashes)
    caches.settle("e", {KvMedium.DEVICE: device, KvMedium.STATE: hashes[1]})
    assert caches.cached_tokens(asked(PROMPT)) == {"e": 2 * SIZE}
    caches.apply("e", [state([hashes[2]])])
    assert caches.cached_tokens(asked(PROMPT)) == {"e": 3 * SIZE}
    assert caches.cached_tokens(asked(PROMPT[: 3 * SIZE])) == {"e": 2 * SIZE}, (
        "the last token needs the state before it"
    )
    caches.apply("e", [BlockRemoved(block_hashes=[hashes[1], hashes[2]], medium=KvMedium.STATE)])
    assert caches.cached_tokens(asked(PROMPT)) == {}
    caches.apply("e", [state([hashes[0]]), BlockRemoved(block_hashes=hashes)])
    assert caches.cached_tokens(asked(PROMPT)) == {}, "a state without keys and values"
    assert caches.num_on("e") == 0


def test_a_reset_forgets_states() -> None:
    caches, hashes = PrefixCaches(max_blocks=100), blocks_of_prompt()
    caches.begin("e", SIZE, has_states=True)
    caches.settle("e", {KvMedium.DEVICE: b"".join(hashes), KvMedium.STATE: b"".join(hashes)})
    assert caches.cached_tokens(asked(PROMPT)) == {"e": len(hashes) * SIZE}
    caches.apply("e", [AllBlocksCleared(), kept(KvMedium.DEVICE, hashes)])
    assert caches.cached_tokens(asked(PROMPT)) == {}


def test_states_of_an_engine_without_recurrent_layers_are_ignored() -> None:
    caches, hashes = PrefixCaches(max_blocks=100), blocks_of_prompt()
    caches.begin("e", SIZE)
    caches.settle("e", {KvMedium.DEVICE: b"".join(hashes)})
    caches.apply("e", [BlockRemoved(block_hashes=hashes, medium=KvMedium.STATE), state(hashes)])
    assert caches.cached_tokens(asked(PROMPT)) == {"e": len(hashes) * SIZE}


def blocks_of_prompt() -> list[bytes]:
    """Return the hashes of the whole blocks of ``PROMPT``."""
    engine = Engine()
    request = engine.request(asked(PROMPT))
    engine.manager.hash_prompt(request)
    return request.block_hashes


def test_a_reset_clears_one_engine_alone() -> None:
    engine, caches = Engine(), following("e", "f")
    events = engine.compute(asked(PROMPT))
    caches.apply("e", events)
    caches.apply("f", events)
    caches.apply("e", [AllBlocksCleared()])
    assert caches.cached_tokens(asked(PROMPT)) == {"f": 16}


def test_evicted_blocks_are_not_found() -> None:
    engine, caches = Engine(num_blocks=6), following("e")
    caches.apply("e", engine.compute(asked(PROMPT)))
    events = engine.compute(asked([1] * 18))
    assert any(isinstance(event, BlockRemoved) for event in events)
    caches.apply("e", events)
    assert caches.cached_tokens(asked(PROMPT)).get("e", 0) == engine.cached(asked(PROMPT)) == 0


def test_a_very_long_prompt_is_looked_up_as_far_as_the_event_loop_can_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_caches, "MAX_BLOCKS_LOOKED_UP", 2)
    engine, caches = Engine(), following("e")
    caches.apply("e", engine.compute(asked(PROMPT)))
    assert caches.cached_tokens(asked(PROMPT)) == {"e": 2 * SIZE}


def test_no_more_is_remembered_than_may_be() -> None:
    caches = PrefixCaches(3)
    caches.begin("e", SIZE)
    blocks = [bytes([number]) * 16 for number in range(5)]
    caches.apply("e", [BlockStored(block_hashes=blocks, parent_hash=b"", token_ids=[0] * 20, block_size=SIZE)])
    assert caches.full
    assert caches.num_blocks == 3


def test_media_that_an_engine_has_count_as_if_it_had_their_tokens() -> None:
    first, second = item("a", 1, offset=10, length=20), item("b", 1, offset=40, length=5)
    counts = with_media({"e0": 16, "e1": 64, "e2": 8}, {"e0": [first], "e1": [first, second], "e3": [second]})
    assert counts == {"e0": 16 + 14, "e1": 64, "e2": 8, "e3": 5}


# An engine's blocks by medium, compared with plain sets.

BLOCKS = [bytes([number]) for number in range(4)]


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.sampled_from(KvMedium),
            st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=4, unique=True),
        ),
        max_size=30,
    )
)
def test_a_block_is_nowhere_once_it_has_left_every_medium(changes: list[tuple[bool, KvMedium, list[bytes]]]) -> None:
    places, held = BlockPlaces(), {medium: set[bytes]() for medium in KvMedium}
    found: set[bytes] = set()
    for stored, medium, blocks in changes:
        if stored:
            places.stored(medium, blocks, found.__contains__)
            found.update(blocks)
            held[medium].update(blocks)
        else:
            found.difference_update(places.removed(medium, blocks))
            held[medium].difference_update(blocks)
        assert found == set().union(*held.values())
    assert set(places._media) == set().union(
        *(blocks for medium, blocks in held.items() if medium is not KvMedium.DEVICE)
    )


def test_nothing_is_kept_of_engines_that_have_blocks_in_their_kv_cache_alone() -> None:
    places = BlockPlaces()
    places.stored(KvMedium.DEVICE, BLOCKS, lambda _: False)
    assert not places._media
    assert places.removed(KvMedium.DEVICE, BLOCKS) == BLOCKS
    places.stored(KvMedium.HOST, BLOCKS, lambda _: False)
    places.clear()
    assert places.removed(KvMedium.HOST, BLOCKS) == []


# The index of cached blocks, compared with plain sets.

ENGINES = st.sampled_from([f"e{number}" for number in range(5)])
PROMPTS = st.text("ab", min_size=1, max_size=9)
"""Prompts. Each prefix of a prompt is a block."""


def blocks_of(prompt: str, first: int = 0) -> list[bytes]:
    return [prompt[: end + 1].encode() for end in range(first, len(prompt))]


class IndexMachine(RuleBasedStateMachine):
    """Compares the index with ``model``, which has each engine's blocks. An engine that has a block has all blocks
    before it.
    """

    @initialize(limit=st.sampled_from([0, 3, 10, 1000]), stride=st.sampled_from([1, 2, 3, 16]))
    def start(self, limit: int, stride: int) -> None:
        self.usual, prefix_caches._STRIDE = prefix_caches._STRIDE, stride
        self.limit = limit
        self.index = PrefixIndex(limit)
        self.model: dict[str, set[bytes]] = {}

    def size(self) -> int:
        return sum(map(len, self.model.values()))

    @rule(engine=ENGINES, prompt=PROMPTS, first=st.integers(0, 3))
    def store(self, engine: str, prompt: str, first: int) -> None:
        known, left_out = self.model.setdefault(engine, set()), 0
        parent, blocks = prompt[:first].encode(), blocks_of(prompt, first)
        for block in blocks:
            if block in known:
                continue
            if self.size() < self.limit and (not parent or parent in known):
                known.add(block)
            else:
                left_out += 1
        assert self.index.store(engine, blocks, parent) == left_out

    @rule(engine=ENGINES, prompt=PROMPTS)
    def remove(self, engine: str, prompt: str) -> None:
        """Remove a block, after the blocks that follow it."""
        known = self.model.get(engine, set())
        gone = sorted((block for block in known if block.startswith(prompt.encode())), reverse=True)
        self.index.remove(engine, [*gone, b"never there"])
        known.difference_update(gone)

    @rule(engine=ENGINES)
    def clear(self, engine: str) -> None:
        self.index.clear(engine)
        self.model.pop(engine, None)

    @rule(prompt=st.text("ab", max_size=12))
    def look_up(self, prompt: str) -> None:
        expected = {}
        for engine, blocks in self.model.items():
            missing = [place for place, block in enumerate(blocks_of(prompt)) if block not in blocks]
            if run := min(missing, default=len(prompt)):
                expected[engine] = run
        hashes = iter(blocks_of(prompt))
        assert self.index.runs(hashes) == expected
        num_read = len(prompt) - len(list(hashes))
        assert num_read <= max(expected.values(), default=0) + prefix_caches._STRIDE

    @invariant()
    def the_size_is_that_of_all_engines_and_within_the_limit(self) -> None:
        assert len(self.index) == self.size() <= self.limit
        assert self.index.full == (self.size() >= self.limit)
        for engine, blocks in self.model.items():
            assert self.index.num_on(engine) == len(blocks)

    def teardown(self) -> None:
        prefix_caches._STRIDE = self.usual
        for engine in self.model:
            self.index.clear(engine)
        assert not self.index._holders
        assert not self.index._bits
        assert not any(self.index._engines)


TestPrefixIndex = IndexMachine.TestCase
TestPrefixIndex.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_prompt_without_a_single_block_is_found_nowhere() -> None:
    index = PrefixIndex(10)
    index.store("e", [b"a"])
    assert index.runs([]) == {}


def test_an_engine_beyond_the_64th_is_found_too() -> None:
    index = PrefixIndex(1000)
    for number in range(200):
        index.store(f"e{number}", [b"a"])
    index.clear("e3")
    index.store("new", [b"a"])
    assert index.runs([b"a"]) == {f"e{number}": 1 for number in range(200) if number != 3} | {"new": 1}
