"""The index of cached blocks, against plain sets."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock_frontend.dispatch import prefix_caches
from penstock_frontend.dispatch.prefix_caches import PrefixIndex

ENGINES = st.sampled_from([f"e{number}" for number in range(5)])
PROMPTS = st.text("ab", min_size=1, max_size=9)
"""Every beginning of one is a block."""


def blocks_of(prompt: str, first: int = 0) -> list[bytes]:
    return [prompt[: end + 1].encode() for end in range(first, len(prompt))]


class IndexMachine(RuleBasedStateMachine):
    """``model``: by engine, the blocks that it has, with each all those before it."""

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
        """A block, and before it what stands behind it."""
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
