"""Attention over a latent cache, against the reference on keys and values that are parts of one another."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.attention.kv_cache import KVCache
from tests.fakes.models.interpreted_kernels import interpreted, sum_in_order
from tests.unit.enginecore.attention.test_backends import CPU, Step, make_step
from tests.unit.enginecore.forward.cuda.kernels.paged import Paged, expected

latent_attention = interpreted("latent_attention")
configurations = interpreted("configurations")
SCALING = 0.3


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use pieces of 32 keys, so that few keys make several pieces."""
    real = latent_attention.latent_tiles

    def tiles(rows: int, itemsize: int, device: str, *, invariant: bool) -> Any:
        return configurations.msgspec.structs.replace(real(rows, itemsize, device, invariant=invariant), piece=32)

    monkeypatch.setattr(latent_attention, "latent_tiles", tiles)


def make_latent_step(
    query_lens: list[int], seq_lens: list[int], heads: int = 4, latent: int = 16, rotary: int = 8, **how: Any
) -> Step:
    """Return a step like ``make_step``. Its values are the first numbers of the keys of one head."""
    sizes = {"head_size": latent + rotary, "head_size_v": latent}
    step = make_step(query_lens, seq_lens, block_size=16, heads=(heads, 1), **sizes, **how)
    cache = KVCache(step.cache.keys, step.cache.keys[:, :latent], 1)
    return replace(step, cache=cache, value=step.key[..., :latent])


def attended(step: Step, tokens: int = 0, requests: int = 0, *, invariant: bool = False) -> torch.Tensor:
    """Compute attention with output and scratch memory that hold NaN before. The step is padded to ``tokens`` and
    ``requests``.
    """
    paged = Paged.of(step, requests=requests)
    padding = step.query.new_full((max(tokens - len(step.query), 0), *step.query.shape[1:]), torch.nan)
    query = torch.cat([step.query, padding])
    latent = step.cache.values.shape[1]
    out = query.new_full((*query.shape[:2], latent), torch.nan)
    pieces = latent_attention.latent_pieces(query.shape[1])
    capacity = max(len(query), len(paged.group.seq_lens))
    scratch = latent_attention.Scratch.allocate(capacity, pieces, *out.shape[1:], CPU)
    for tensor in (scratch.sums, scratch.largest, scratch.total):
        tensor.fill_(torch.nan)
    latent_attention.attend_latent(query, paged.keys, paged.group, SCALING, out, scratch, invariant=invariant)
    return out


def check(step: Step, **how: Any) -> None:
    right = expected(step, AttentionParams(SCALING))
    found = attended(step, **how)
    tolerance = 2e-5 if right.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found[: len(right)], right, rtol=tolerance, atol=tolerance / 10)
    assert bool(found[len(right) :].isnan().all())


@pytest.mark.slow
@settings(max_examples=8)
@given(
    requests=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 40)), min_size=1, max_size=3),
    heads=st.sampled_from([1, 3, 4, 20]),
    sizes=st.sampled_from([(16, 8), (24, 4), (32, 16)]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    invariant=st.booleans(),
)
def test_any_shape(
    requests: list[tuple[int, int]], heads: int, sizes: tuple[int, int], dtype: torch.dtype, invariant: bool
) -> None:
    new = [count for count, _ in requests]
    step = make_latent_step(new, [count + before for count, before in requests], heads, *sizes, dtype=dtype)
    check(step, tokens=sum(new) + 2, requests=len(new) + 1, invariant=invariant)


def test_more_heads_than_rows_of_a_tile() -> None:
    check(make_latent_step([1, 2], [18, 9], 66, dtype=torch.float16))


@pytest.mark.usefixtures("short_pieces")
def test_a_decode_in_pieces_of_several_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    check(make_latent_step([1, 1, 1], [90, 33, 4]))
    monkeypatch.setattr(latent_attention, "_PIECES", 8)  # with 4 heads, there are 2 pieces of 64 keys each
    check(make_latent_step([1], [90]))


@pytest.mark.usefixtures("short_pieces")
def test_keys_of_a_few_new_tokens_are_split_too(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_latent_step([1, 9, 3, 2], [90, 70, 3, 65])
    check(step, requests=6, tokens=30)
    split = attended(step)
    monkeypatch.setattr(latent_attention, "LONGEST_SPLIT", 4)
    whole = attended(step)
    changed = (split != whole).flatten(1).any(1).nonzero().ravel().tolist()
    assert changed
    assert set(changed) <= set(range(1, 10))  # only the second request is no longer split


def test_a_step_of_decodes_launches_no_kernel_for_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    kernel = latent_attention.latent_attention

    class Recorded:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: (launched.append(options["SPLITS"]), kernel[grid](*args, **options))

    monkeypatch.setattr(latent_attention, "latent_attention", Recorded())
    for new, how, expected_launches in (
        ([1, 1], {}, [True]),
        ([1, 2], {}, [True, False]),
        ([1, 1], {"invariant": True}, [False]),
    ):
        launched.clear()
        check(make_latent_step(new, [18, 9]), **how)
        assert launched == expected_launches


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.usefixtures("short_pieces")
def test_a_token_has_the_same_bits_as_a_decode_and_in_a_prompt(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sum_in_order(monkeypatch)
    step = make_latent_step([5], [70], dtype=dtype)
    alone = replace(
        step,
        query=step.query[-1:],
        metadata=replace(step.metadata, query_start_loc=step.metadata.query_start_loc // 5),
    )
    whole = attended(step, invariant=True)
    assert torch.equal(attended(alone, invariant=True)[-1], whole[-1])
    torch.testing.assert_close(attended(alone)[-1], whole[-1], rtol=1e-2, atol=1e-3)
    if dtype == torch.float32:
        assert not torch.equal(attended(alone)[-1], whole[-1])  # the split into pieces changes the bits


def one_slot_late(real: Any) -> Any:
    return lambda cache, table, stride, positions, *rest: real(cache, table, stride, positions + 1, *rest)


def without_what_turns(real: Any) -> Any:
    """Return the function with a fault: it reads the rotary part where the latent begins."""
    return lambda cache, table, stride, positions, there, block, width, first, *rest: real(
        cache, table, stride, positions, there, block, width, 0, *rest
    )


def all_visible(real: Any) -> Any:
    """Return the function with a fault: it masks only missing keys."""
    return lambda weighed, *rest: real(latent_attention.tl.where(weighed > float("-inf"), weighed, 0.0), *rest)


def pieces_of_another_size(real: Any) -> Any:
    return lambda length, *rest: real(length, *rest) * 0 + 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mutation"),
    [
        ("load_latents", one_slot_late),
        ("load_latents", without_what_turns),
        ("accumulate", all_visible),
        ("piece_size", pieces_of_another_size),
    ],
)
@pytest.mark.usefixtures("short_pieces")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_broken_index_offset_mask_or_piece_is_seen(name: str, mutation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_latent_step([1, 3], [70, 20])
    check(step)
    monkeypatch.setattr(latent_attention, name, mutation(getattr(latent_attention, name)))
    with pytest.raises(AssertionError, match="not close"):
        check(step)


def test_what_tiles_depend_on_is_the_same_for_any_number_of_rows() -> None:
    for itemsize in (2, 4):
        assert len({configurations.latent_tiles(rows, itemsize, invariant=True) for rows in (1, 16, 128)}) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("query", "contiguous"),
        ("scratch", "space for 1 requests of 2 heads, but the step has 1 requests of 4 heads"),
        ("blocks", "blocks of at least 16 tokens, but blocks have 8"),
        ("heads", r"cache \[3, 2, 16, 24\]"),
        ("out", r"output \[1, 4, 24\]"),
        ("apart", "must be multiples of 16"),
        (
            "wide",
            "a latent of 544 elements and 32 rotated elements; the limits are 512 elements of the latent and 64 rotated",
        ),
    ],
)
def test_shapes_that_the_kernel_does_not_take_are_refused(change: str, message: str) -> None:
    paged = Paged.of(make_latent_step([1], [20]))
    query, cache, out = paged.step.query, paged.keys, torch.zeros(1, 4, 16)
    if change == "query":
        query = torch.zeros(1, 24, 4).transpose(1, 2)
    if change == "blocks":
        cache = cache[:, :, :8].contiguous()
    if change == "heads":
        cache = torch.zeros(3, 2, 16, 24)
    if change == "out":
        out = torch.zeros(1, 4, 24)
    if change == "apart":
        cache = torch.zeros(4 * 400).as_strided((3, 1, 16, 24), (392, 384, 24, 1))
    if change == "wide":
        query, cache, out = torch.zeros(1, 4, 576), torch.zeros(3, 1, 16, 576), torch.zeros(1, 4, 544)
    heads = 2 if change == "scratch" else 4
    scratch = latent_attention.Scratch.allocate(1, latent_attention.latent_pieces(heads), heads, out.shape[2], CPU)
    with pytest.raises(ValueError, match=message):
        latent_attention.attend_latent(query, cache, paged.group, SCALING, out, scratch)
