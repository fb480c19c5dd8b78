"""The attention kernels, interpreted, against the reference."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.attention.kv_cache import KVScales
from tests.unit.enginecore.attention.test_backends import CPU, PARAMS, Step, make_step
from tests.unit.enginecore.attention.test_key_ends import dense, spanned, with_ends
from tests.unit.enginecore.forward.cuda.kernels.paged import Paged, attention, expected

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
MIXED = ([1, 20, 1, 2], [530, 50, 7, 90])
SPLIT = ([1, 18, 2, 3, 1], [300, 200, 150, 20, 17])
"""Requests of which four have split keys, if pieces have 128 keys."""


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use pieces of 128 keys, so that few keys make several pieces."""
    real = attention.attention_tiles

    def tiles(*size: int) -> Any:
        found = real(*size)
        return replace(found, decode=structs.replace(found.decode, piece=128))

    monkeypatch.setattr(attention, "attention_tiles", tiles)


class Launches:
    """Records the names and options of the attention kernels that are launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        for name in ("split_keys", "merge_pieces", "prefill_tiles"):
            monkeypatch.setattr(attention, name, self._recorded(name, getattr(attention, name)))

    def _recorded(self, name: str, kernel: Any) -> Any:
        launches = self

        class Recorded:
            def __getitem__(self, grid: Any) -> Any:
                def launch(*args: Any, **options: Any) -> None:
                    launches.seen.append((name, options))
                    kernel[grid](*args, **options)

                return launch

        return Recorded()

    def names(self) -> list[str]:
        """Return the names of the kernels launched since the last call."""
        found = [name for name, _ in self.seen]
        self.seen.clear()
        return found


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_a_mixed_step_is_attended_as_by_the_reference(params: AttentionParams) -> None:
    step = make_step(*MIXED, block_size=16)
    torch.testing.assert_close(Paged.of(step).attend(params), expected(step, params), rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 2, 33])), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 60),
    chunk=st.none() | st.integers(1, 60),
    softcap=st.none() | st.just(3.0),
    sinks=st.booleans(),
    block_size=st.sampled_from([16, 48]),
)
def test_and_so_is_any_step_whatever_the_layer_asks_for(
    requests: list[tuple[int, int]],
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: bool,
    block_size: int,
) -> None:
    step = make_step([new for _, new in requests], [old + new for old, new in requests], block_size=block_size)
    params = AttentionParams(0.25, window, softcap, SINKS if sinks else None, chunk)
    torch.testing.assert_close(Paged.of(step).attend(params), expected(step, params), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_spans_see_keys_behind_themselves_as_in_the_reference(params: AttentionParams) -> None:
    step = spanned(make_step(*MIXED, block_size=16), 2)
    torch.testing.assert_close(Paged.of(step).attend(params), dense(step, params), rtol=2e-5, atol=2e-6)


def test_queries_without_spans_keep_their_bits_beside_those_that_have_some() -> None:
    step = make_step([1, 40, 30], [20, 40, 70], block_size=16)
    ends = step.metadata.positions() + 1
    ends[11:31] = ends[30]
    plain = Paged.of(step).attend(PARAMS["full"])
    beside = Paged.of(with_ends(step, ends)).attend(PARAMS["full"])
    changed = (beside != plain).flatten(1).any(1)
    assert changed.nonzero().ravel().tolist() == list(range(11, 30))


@pytest.mark.each_value
@pytest.mark.parametrize("heads", [(2, 2), (7, 1), (36, 2)], ids=str)
@pytest.mark.parametrize("sizes", [(16, 16), (24, 16), (48, 32), (512, 512)], ids=str)
def test_heads_and_their_sizes_need_not_be_powers_of_two(heads: tuple[int, int], sizes: tuple[int, int]) -> None:
    step = make_step([1, 9], [20, 30], block_size=16, heads=heads, head_size=sizes[0], head_size_v=sizes[1])
    params = AttentionParams(scaling=0.8 / sizes[0] ** 0.5)
    torch.testing.assert_close(Paged.of(step).attend(params), expected(step, params), rtol=2e-5, atol=2e-6)


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("name", ["full", "sinks", "chunk, softcap and sinks"])
def test_keys_of_a_few_new_tokens_are_split_as_by_the_reference(name: str) -> None:
    for params in (PARAMS[name], replace(PARAMS[name], sliding_window=140)):
        step = make_step(*SPLIT, block_size=16)
        right = expected(step, params)
        torch.testing.assert_close(Paged.of(step).attend(params), right, rtol=2e-5, atol=2e-6)
        few = Paged.of(step, requests=9).attend(params, tokens=30, capacity=20)  # no room for the third and the last
        torch.testing.assert_close(few[: len(right)], right, rtol=2e-5, atol=2e-6)
        assert few[len(right) :].isnan().all()


@pytest.mark.usefixtures("short_pieces")
def test_split_keys_have_spans_and_scales() -> None:
    step = spanned(make_step(*SPLIT, block_size=16), 2)
    for params in (PARAMS["full"], PARAMS["sinks"]):
        torch.testing.assert_close(Paged.of(step).attend(params), dense(step, params), rtol=2e-5, atol=2e-6)
    check_fp8(make_step(*SPLIT, block_size=16, dtype=torch.float16))


@pytest.mark.usefixtures("short_pieces")
def test_only_keys_of_several_pieces_and_few_new_tokens_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(*SPLIT, block_size=16)
    split = Paged.of(step).attend(PARAMS["full"])
    monkeypatch.setattr(attention, "LONGEST_SPLIT", 17)
    changed = (Paged.of(step).attend(PARAMS["full"]) != split).flatten(1).any(1).nonzero().ravel().tolist()
    assert changed
    assert set(changed) <= set(range(1, 19))  # the 18 tokens of the second request


@pytest.mark.usefixtures("short_pieces")
def test_steps_launch_only_the_kernels_that_have_work(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    for new, lengths, params, names in (
        ([1, 1], [300, 20], "full", ["split_keys", "merge_pieces"]),
        ([1, 1], [100, 20], "full", ["split_keys"]),  # the block table has space for one piece
        ([1, 1], [300, 20], "window of one", ["split_keys"]),
        ([1, 1], [300, 20], "chunk of one", ["split_keys"]),
        ([1, 1], [300, 20], "window", ["split_keys", "merge_pieces"]),  # 9 keys can be in two pieces
        ([1, 2], [300, 20], "full", ["split_keys", "merge_pieces", "prefill_tiles"]),
        ([1, 2], [100, 20], "full", ["split_keys", "prefill_tiles"]),
    ):
        paged = Paged.of(make_step(new, lengths, block_size=16))
        torch.testing.assert_close(
            paged.attend(PARAMS[params]), expected(paged.step, PARAMS[params]), rtol=2e-5, atol=2e-6
        )
        assert launches.names() == names
        paged.attend(PARAMS[params], invariant=True)
        assert launches.names() == ["prefill_tiles"]


def test_pieces_are_long_if_there_are_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention.piece_of(256, 32, 8, decodes_only=True) == 256
    assert attention.piece_of(256, 64, 8, decodes_only=True) == 2048
    assert attention.piece_of(256, 256, 1, decodes_only=True) == 256
    assert attention.piece_of(256, 128, 8, decodes_only=False) == 256
    assert attention.piece_of(256, 256, 8, decodes_only=False) == 2048
    launches = Launches(monkeypatch)
    step = make_step([1, 1], [600, 20], block_size=16)
    for requests, piece in ((2, 512), (256, 2048)):
        output = Paged.of(step, requests=requests).attend(PARAMS["full"])
        torch.testing.assert_close(output, expected(step, PARAMS["full"]), rtol=2e-5, atol=2e-6)
        assert launches.seen[0][1]["PIECE"] == piece
        assert launches.names() == ["split_keys", "merge_pieces"][: 1 + (piece == 512)]


def test_half_precision_is_close() -> None:
    step = make_step(*MIXED, block_size=16, dtype=torch.float16)
    for params in (PARAMS["full"], PARAMS["sinks and window"]):
        torch.testing.assert_close(Paged.of(step).attend(params), expected(step, params), rtol=2e-2, atol=2e-3)


def test_numbers_of_an_fp8_cache_are_scaled() -> None:
    check_fp8(make_step(*MIXED, block_size=16, dtype=torch.float16))


def check_fp8(step: Step) -> None:
    """Compute attention over an fp8 cache, and compare with the reference."""
    key_scale, value_scale = 0.5, 2.0
    paged = Paged.of(step)
    paged.keys = (paged.keys / key_scale).to(torch.float8_e4m3fn)
    paged.values = (paged.values / value_scale).to(torch.float8_e4m3fn)
    cache = step.cache
    step.cache = replace(
        cache,
        keys=(cache.keys / key_scale).to(torch.float8_e4m3fn).to(torch.float16) * key_scale,
        values=(cache.values / value_scale).to(torch.float8_e4m3fn).to(torch.float16) * value_scale,
    )
    output = paged.attend(PARAMS["full"], scales=KVScales(key_scale, value_scale))
    torch.testing.assert_close(output, expected(step, PARAMS["full"]), rtol=2e-2, atol=2e-3)


def test_padding_changes_no_bit_and_its_outputs_are_left_alone() -> None:
    step = make_step(*MIXED, block_size=16)
    exact = Paged.of(step).attend(PARAMS["sinks and window"])
    spare = max(set(range(len(Paged.of(step).keys))) - set(step.metadata.block_table.reshape(-1).tolist()))
    padded = Paged.of(step, requests=9, blocks=70, spare=spare).attend(PARAMS["sinks and window"], tokens=40)
    assert torch.equal(padded[: len(exact)], exact)
    assert padded[len(exact) :].isnan().all()


@pytest.mark.parametrize("name", ["full", "chunk, softcap and sinks"])
def test_bits_alone_are_the_bits_in_a_crowd(name: str) -> None:
    crowd = Paged.of(make_step([1, 20, 1, 5, 1], [600, 50, 7, 90, 40], block_size=16))
    together = crowd.attend(PARAMS[name])
    metadata = crowd.step.metadata
    for i in range(metadata.num_requests):
        first, last = (int(x) for x in metadata.query_start_loc[i : i + 2])
        alone = replace(crowd, step=replace(crowd.step, query=crowd.step.query[first:last]))
        alone.group = replace(
            crowd.group,
            block_table=crowd.group.block_table[i : i + 1],
            seq_lens=crowd.group.seq_lens[i : i + 1],
            query_start_loc=torch.tensor([0, last - first], dtype=torch.int32),
        )
        assert torch.equal(alone.attend(PARAMS[name]), together[first:last])


@pytest.mark.slow
def test_a_long_decode_is_cut_into_as_many_pieces_as_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_ITEMS_PER_REQUEST", 1)
    step = make_step([1], [16 * 512 + 3], block_size=256, heads=(1, 1))
    torch.testing.assert_close(
        Paged.of(step).attend(PARAMS["full"]), expected(step, PARAMS["full"]), rtol=2e-5, atol=2e-6
    )


MUTATIONS = {
    "block index": ("table + positions // BLOCK_SIZE", "table + positions // BLOCK_SIZE * 0"),
    "slot of a block": ("+ positions % BLOCK_SIZE)", "+ positions % 8)"),
    "stride of blocks": ("rows = blocks * stride", "rows = blocks * (stride // 2)"),
    "head of a block": ("(head * BLOCK_SIZE", "(head * 0 * BLOCK_SIZE"),
    "padding of heads": ("there[:, None] & (numbers < SIZE)", "there[:, None] & (numbers < PADDED)"),
    "scale": ("* scaling", "* (scaling * 1.01)"),
    "mask of scores": ("tl.where(visible, dots", "tl.where(visible | True, dots"),
    "window": ("position - WINDOW + 1", "position - WINDOW"),
    "chunk": ("position // ATTENTION_CHUNK * ATTENTION_CHUNK", "position - ATTENTION_CHUNK"),
    "shrinking": ("sums * shrink[:, None]", "sums"),
    "end of a decode": (
        "seen = (positions >= first) & (positions < end)",
        "seen = (positions >= first) & (positions <= end)",
    ),
    "sink of one piece": ("total = tl.where(alone, total + 1.0, total)", "total = total + 0.0"),
    "row of a query": ("rows_upto - new, 0), 0)", "rows_upto, 0), 0)"),
    "owner of a row": ("(upto <= row)", "(upto < row)"),
    "end of a split span": ("last = tl.max(end_of_row, 0)", "last += 0"),
    "first piece": ("first_key(position, WINDOW, ATTENTION_CHUNK) // 128 * 128", "position // 128 * 128"),
    "sink of a decode": (
        "largest = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634\n            total += 1.0",
        "largest = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634\n            total += 0.0",
    ),
    "merge of the first piece": ("written = places < pieces", "written = (places > 0) & (places < pieces)"),
    "request of a decode": (
        "token = tl.load(query_start_loc + request)\n        piece",
        "token = request\n        piece",
    ),
    "causality": ("end_of_row = at + 1", "end_of_row = at + 2"),
    "end of a span": ("end = tl.max(end_of_row, 0)", "end += 0"),
    "token of a span": ("key_ends + begin + queries", "key_ends + queries"),
    "head of a row": ("rows % GROUP", "rows // QUERIES"),
    "last tile": ("& (queries < num_queries)", ""),
    "sink of a prefill": ("sinks + heads", "sinks + rows % GROUP"),
}


def mutate(folder: Path, old: str, new: str, patch: pytest.MonkeyPatch) -> None:
    """Compute attention with a copy of the kernels' source in which ``old`` is replaced by ``new``."""
    source = Path(attention.__file__).read_text()
    assert old in source
    name = f"mutated_{folder.name}"
    (folder / f"{name}.py").write_text(source.replace(old, new))
    patch.syspath_prepend(folder)
    module = importlib.import_module(name)
    for kernel in ("split_keys", "merge_pieces", "prefill_tiles"):
        patch.setattr(attention, kernel, getattr(module, kernel))
    patch.delitem(sys.modules, name)


def is_wrong(step: Step, params: AttentionParams) -> bool:
    """Return whether outputs differ from the reference, or padding is written."""
    output = Paged.of(step).attend(params, tokens=64)
    right = expected(step, params)
    same = torch.allclose(output[: len(right)], right, rtol=2e-5, atol=2e-6)
    return not same or not bool(output[len(right) :].isnan().all())


@pytest.mark.slow
@pytest.mark.usefixtures("short_pieces")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_broken_kernel_is_caught(mutation: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        (make_step([1, 5], [530, 20], block_size=16, head_size=24), replace(PARAMS["softcap"], sinks=SINKS)),
        (make_step([1, 1, 3], [40, 18, 30], block_size=16), PARAMS["window"]),
        (make_step([3, 1], [30, 17], block_size=16), PARAMS["chunk"]),
        (spanned(make_step([3, 80], [30, 90], block_size=16), 1, longest=70), PARAMS["full"]),
        (make_step([1, 1], [150, 18], block_size=16), PARAMS["sinks"]),
        (make_step([9, 1, 2], [200, 150, 20], block_size=16), PARAMS["window"]),
        (spanned(make_step([3, 40], [30, 300], block_size=16), 1, longest=30), PARAMS["full"]),
    ]
    mutate(tmp_path, *mutation, monkeypatch)
    assert any(is_wrong(*step) for step in steps)


def test_nothing_is_caught_where_nothing_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step([1, 5], [40, 20], block_size=16)
    mutate(tmp_path, "", "", monkeypatch)
    assert not is_wrong(step, PARAMS["full"])


def test_unaligned_sizes_are_refused() -> None:
    paged = Paged.of(make_step([1], [20], block_size=16))
    shape = paged.keys.shape
    numbers = torch.zeros(paged.keys.numel() + 64)
    off = numbers[1 : 1 + paged.keys.numel()].view(shape)
    with pytest.raises(ValueError, match="must be multiples of 16"):
        replace(paged, keys=off).attend(PARAMS["full"])
    block = shape[1:].numel()
    apart = torch.zeros(shape[0] * (block + 8)).as_strided(shape, (block + 8, *paged.keys.stride()[1:]))
    with pytest.raises(ValueError, match="must be multiples of 16"):
        replace(paged, values=apart).attend(PARAMS["full"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("query", "contiguous"),
        ("scratch", "space for 1 requests of 2 heads with values of size 16, but the step has 1 requests of 4 heads"),
        ("blocks", "blocks of at least 16 tokens, but blocks have 8"),
        ("heads", "the number of query heads, 4, is not a multiple of the number of KV heads, 3"),
    ],
)
def test_shapes_that_the_kernels_do_not_take_are_refused(change: str, message: str) -> None:
    paged = Paged.of(make_step([1], [20], block_size=16))
    query, keys, values = paged.step.query, paged.keys, paged.values
    scratch = attention.Scratch.allocate(1, 128, 2 if change == "scratch" else 4, 16, CPU)
    if change == "query":
        query = torch.zeros(1, 16, 4).transpose(1, 2)
    if change == "blocks":
        keys = keys[:, :, :8]
    if change == "heads":
        keys = torch.zeros(3, 3, 16, 16)
    out = torch.zeros(1, 4, 16)
    with pytest.raises(ValueError, match=message):
        attention.attend(query, keys, values, out, paged.group, PARAMS["full"], scratch)


def test_heads_larger_than_any_tile_are_refused() -> None:
    step = make_step([1], [3], block_size=16, head_size=516, head_size_v=16)
    with pytest.raises(ValueError, match="no attention tiles for heads of 1024 elements of 4 bytes"):
        Paged.of(step).attend(PARAMS["full"])
