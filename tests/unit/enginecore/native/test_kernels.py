"""The kernels of every instruction set that this machine runs, against torch and the reference."""

import threading
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from penstock_enginecore.attention.base import AttentionMetadata, AttentionParams, StepPlan
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.attention.kv_cache import SLOTS, KVCache
from penstock_enginecore.models.dtypes import NarrowWeight
from penstock_enginecore.native import library as library_module
from penstock_enginecore.native.attention import PAIRS, TILES, NativeAttention
from penstock_enginecore.native.backend import NativeSampling, PackedLayers
from penstock_enginecore.native.library import KernelsError, NativeLibrary, open_library
from penstock_enginecore.native.linear import PackedLinear
from penstock_enginecore.native.weights import PackedWeight, multiply, round_to_int8
from penstock_enginecore.sample.base import DrawSettings, SamplingInputs, uniforms
from penstock_enginecore.sample.rules import Entries, GrammarRows, LogitRules, mask_grammar
from penstock_enginecore.sample.sampler import TorchSampler
from tests.fakes.engines.instruction_sets import runnable
from tests.unit.enginecore.attention.test_backends import CPU, PARAMS, Step, make_step, random_lengths

sample = TorchSampler().sample


ISAS = runnable()


@pytest.fixture(scope="module", params=ISAS)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return open_library(request.param, 2)


def test_the_kernels_are_built() -> None:
    assert "baseline" in ISAS, "install the package where a C++ compiler is"
    assert open_library("auto", 1).isa == next(isa for isa in ISAS if isa != "avx512_bf16")
    assert open_library("auto", 1, rounded=True).isa == ISAS[0]


def linear(library: NativeLibrary, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
        return PackedLinear(library, layer)(x)


def kept(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values that a weight has after it is packed as ``dtype``."""
    return round_to_int8(weight) if dtype == torch.int8 else weight.to(dtype).float()


KINDS = [torch.float32, torch.bfloat16, torch.int8]


@pytest.mark.each_value
@pytest.mark.parametrize("kept_as", KINDS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 3), (32, 16), (33, 40), (130, 65), (256, 1024)])
def test_a_packed_product_equals_torchs_for_any_shape(
    library: NativeLibrary, n: int, k: int, kept_as: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(n)
    weight, bias = kept(torch.randn(n, k, generator=generator), kept_as), torch.randn(n, generator=generator)
    for rows in (1, 2, 5, 6, 7, 12, 13, 31, 100, 203):
        x = torch.randn(rows, k, generator=generator)
        for b in (None, bias):
            exact = F.linear(x.double(), weight.double(), None if b is None else b.double()).float()
            torch.testing.assert_close(linear(library, x, weight, b), exact, rtol=1e-5, atol=1e-5 * k**0.5)


@pytest.mark.parametrize("kept_as", KINDS)
@pytest.mark.parametrize(("n", "k"), [(5, 3), (33, 40), (130, 65)])
def test_rows_of_a_packed_weight_are_those_of_the_weight(
    library: NativeLibrary, n: int, k: int, kept_as: torch.dtype
) -> None:
    weight = kept(torch.randn(n, k), kept_as)
    packed = PackedWeight(library, weight)
    assert packed.dtype == kept_as
    indices = torch.randint(0, n, (2, 7))
    assert torch.equal(packed.rows(library, indices), weight[indices])
    assert packed.rows(library, indices[:, :0]).shape == (2, 0, k)
    for wrong in (-1, n):
        with pytest.raises(IndexError, match=f"row {wrong} is out of range: the weight has the rows 0 to {n - 1}"):
            packed.rows(library, torch.tensor([0, wrong]))


@pytest.mark.parametrize("kept_as", KINDS)
def test_a_rows_product_is_the_same_whatever_is_computed_beside_it(
    library: NativeLibrary, kept_as: torch.dtype
) -> None:
    weight, bias, x = kept(torch.randn(70, 1022), kept_as), torch.randn(70), torch.randn(64, 1022)
    whole = linear(library, x, weight, bias)
    for start, end in ((0, 1), (3, 5), (10, 23), (1, 64)):
        assert torch.equal(linear(library, x[start:end], weight, bias), whole[start:end])


def test_a_packed_layer_keeps_leading_dimensions_and_refuses_what_it_cannot_take(library: NativeLibrary) -> None:
    layer = PackedLinear(library, torch.nn.Linear(8, 3))
    assert layer(torch.randn(2, 0, 8)).shape == (2, 0, 3)
    assert layer(torch.randn(2, 5, 8).transpose(0, 1)).shape == (5, 2, 3)
    with pytest.raises(TypeError, match=r"packed layers need float32 \[..., 8\], not torch.float64"):
        layer(torch.randn(2, 8, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"\[2, 7\]"):
        layer(torch.randn(2, 7))


def test_shared_layers_are_packed_once(library: NativeLibrary) -> None:
    shared = torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(shared, torch.nn.ReLU(), shared, torch.nn.Linear(4, 2, dtype=torch.bfloat16))
    packed = PackedLayers(model, library)
    assert packed.num_layers == 1
    assert model[0] is model[2]
    assert isinstance(model[0], PackedLinear)
    assert packed.num_bytes >= 4 * (16 + 4)
    assert type(model[3]) is torch.nn.Linear


def test_a_layer_is_let_go_of_before_the_next_one_is_packed(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    weights = [weakref.ref(layer.weight) for layer in model]
    there: list[int] = []
    pack = PackedWeight.__init__

    def spy(self: PackedWeight, *args: Any, **kwargs: Any) -> None:
        there.append(sum(weight() is not None for weight in weights))
        pack(self, *args, **kwargs)

    monkeypatch.setattr(PackedWeight, "__init__", spy)
    PackedLayers(model, library)
    assert there == [3, 2, 1]
    assert not any(weight() is not None for weight in weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 70, 333])
def test_a_narrow_weight_is_packed_in_pieces_as_it_would_be_whole(
    library: NativeLibrary, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = torch.randn(rows, 37).to(dtype), torch.randn(rows).to(dtype)
    whole = PackedWeight(library, weight.float(), bias.float())
    monkeypatch.setattr("penstock_enginecore.native.weights._PIECE", 4000)
    packed = PackedWeight(library, NarrowWeight(weight), bias)
    assert packed.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    assert all(map(torch.equal, packed.memory, whole.memory))
    x = torch.randn(5, 37)
    expected = torch.nn.functional.linear(x, weight.float(), bias.float())
    torch.testing.assert_close(multiply(library, packed, x), expected, rtol=1e-4, atol=1e-4)


def native(library: NativeLibrary) -> NativeAttention:
    return NativeAttention(library, create_backend("cpu", CPU))


def keep(step: Step, backend: NativeAttention) -> KVCache:
    """The step's cache in the kernels' layout: every token that has a slot is written, the rest stays NaN."""
    dtype = backend.library.rounds_to or step.cache.keys.dtype
    cache = replace(
        step.cache,
        keys=torch.full_like(step.cache.keys, torch.nan, dtype=dtype),
        values=torch.full_like(step.cache.values, torch.nan, dtype=dtype),
        layout=step.layout(backend, dtype),
    )
    slots = np.concatenate(
        [step.metadata.slots(i, 0, int(length)) for i, length in enumerate(step.metadata.seq_lens)]
    ).astype(np.int64)
    keys, values = step.cache.gather(torch.from_numpy(slots))
    backend.write(cache, StepPlan(replace(step.metadata, slot_mapping=slots), CPU), keys, values)
    return cache


def attend(library: NativeLibrary, step: Step, params: AttentionParams) -> torch.Tensor:
    backend = native(library)
    cache = keep(step, backend)
    assert cache.layout is (PAIRS if library.rounds_to else TILES)
    return backend.attend(step.query, step.key, step.value, cache, StepPlan(step.metadata, CPU), params)


def attend_part(
    backend: NativeAttention, whole: Step, cache: KVCache, part: slice, params: AttentionParams
) -> torch.Tensor:
    """Return the attention of a part of the first request's queries, computed alone."""
    metadata = AttentionMetadata(
        np.array([0, part.stop - part.start]),
        np.array([part.stop]),
        whole.metadata.block_table[:1],
        whole.metadata.slot_mapping[part],
        16,
    )
    plan = StepPlan(metadata, CPU)
    return backend.attend(whole.query[part], whole.key[part], whole.value[part], cache, plan, params)


@pytest.mark.each_value
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_attention_equals_the_reference_on_mixed_steps(
    library: NativeLibrary, params: AttentionParams, block_size: int
) -> None:
    for seed in range(4):
        step = make_step(*random_lengths(seed), block_size=block_size, seed=seed)
        torch.testing.assert_close(attend(library, step, params), step.run("reference", params), rtol=2e-5, atol=4e-6)


@pytest.mark.parametrize(
    ("heads", "head_size", "head_size_v"),
    [((1, 1), 16, 16), ((6, 2), 64, 64), ((71, 1), 32, 32), ((32, 2), 128, 128), ((4, 4), 24, 16), ((4, 2), 192, 128)],
)
def test_attention_takes_any_number_of_heads_and_sizes_of_keys(
    library: NativeLibrary, heads: tuple[int, int], head_size: int, head_size_v: int
) -> None:
    step = make_step(
        [1, 70, 5], [200, 70, 90], block_size=16, heads=heads, head_size=head_size, head_size_v=head_size_v
    )
    params = AttentionParams(scaling=head_size**-0.5)
    torch.testing.assert_close(attend(library, step, params), step.run("reference", params), rtol=3e-5, atol=4e-6)


def test_a_querys_attention_is_the_same_whatever_is_computed_beside_it(library: NativeLibrary) -> None:
    params = AttentionParams(scaling=0.25)
    whole = make_step([150, 40], [150, 170], block_size=16, heads=(6, 2), head_size=32, head_size_v=32)
    expected = attend(library, whole, params)
    backend = native(library)
    cache = keep(whole, backend)
    for i in (0, 1, 63, 64, 65, 149):
        one = slice(i, i + 1)
        assert torch.equal(attend_part(backend, whole, cache, one, params), expected[one])


@pytest.mark.parametrize(("block_size", "head_size_v"), [(4, 16), (24, 16), (16, 10)])
def test_sizes_without_kernels_use_the_layout_of_torch(
    library: NativeLibrary, block_size: int, head_size_v: int
) -> None:
    step = make_step([1, 9], [30, 9], block_size=block_size, head_size_v=head_size_v)
    backend, params = native(library), AttentionParams(scaling=0.25)
    assert step.layout(backend) is SLOTS
    got = backend.attend(step.query, step.key, step.value, keep(step, backend), StepPlan(step.metadata, CPU), params)
    torch.testing.assert_close(got, step.run("reference", params), rtol=2e-5, atol=2e-6)


def test_a_score_that_is_no_number_reaches_the_output(library: NativeLibrary) -> None:
    step = make_step([1, 1], [20, 20], block_size=16)
    step.query[0] = torch.nan
    output = attend(library, step, AttentionParams(scaling=0.25))
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


def inputs(rows: int, temperature: float, draws: np.ndarray, rules: LogitRules | None = None) -> SamplingInputs:
    return SamplingInputs(
        DrawSettings.off(rows)._replace(temperature=np.full(rows, temperature)),
        uniforms=draws,
        rules=rules or LogitRules(),
    )


@pytest.mark.each_value
@pytest.mark.parametrize("width", [1, 7, 255, 256, 300, 8193])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 5.0, 1e-6])
def test_tokens_are_those_of_torch(library: NativeLibrary, width: int, temperature: float) -> None:
    rows = 200
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(width)) * 3
    draws = uniforms(np.arange(rows, dtype=np.uint64), np.zeros(rows, dtype=np.int64))
    expected = sample(logits.clone(), inputs(rows, temperature, draws)).token_ids
    got = TorchSampler(NativeSampling(library)).sample(logits, inputs(rows, temperature, draws)).token_ids
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("width", [1, 31, 32, 33, 300, 2048, 8193, 40_000])
@pytest.mark.parametrize("rows", [[0], [4, 1], [0, 1, 2, 3, 4]])
def test_masked_rows_are_those_of_torch(library: NativeLibrary, width: int, rows: list[int]) -> None:
    rng = np.random.default_rng(width)
    logits = torch.from_numpy(rng.standard_normal((5, width)).astype(np.float32))
    logits[1, width // 2], logits[4, 0] = torch.nan, -torch.inf
    bitmask = rng.integers(-(2**31), 2**31, (len(rows), -(-width // 32)), dtype=np.int32)
    bitmask[0, ::3], bitmask[-1, ::4] = -1, 0
    grammar = GrammarRows(np.array(rows, dtype=np.int64), bitmask)
    expected, got = logits.clone(), logits.clone()
    mask_grammar(expected, grammar)
    NativeSampling(library).mask(got, grammar)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_a_constrained_row_samples_what_its_mask_allows_and_leaves_the_others_alone(library: NativeLibrary) -> None:
    rows, width = 17, 2048
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
    bitmask = np.zeros((1, width // 32), np.int32)
    bitmask[0, 3] = 1 << 5
    rules = LogitRules(grammar=GrammarRows(np.array([7]), bitmask))
    draws = uniforms(np.arange(rows, dtype=np.uint64), np.zeros(rows, dtype=np.int64))
    free = TorchSampler(NativeSampling(library)).sample(logits.clone(), inputs(rows, 1.0, draws)).token_ids
    got = TorchSampler(NativeSampling(library)).sample(logits.clone(), inputs(rows, 1.0, draws, rules)).token_ids
    free[7] = 3 * 32 + 5
    assert got.tolist() == free.tolist()


@pytest.mark.parametrize("draw", [0.0, 0.5, np.nextafter(1.0, 0.0)])
def test_tokens_that_are_out_are_never_drawn(library: NativeLibrary, draw: float) -> None:
    logits = torch.full((1, 700), -torch.inf)
    logits[0, [5, 400]] = torch.tensor([1.0, 1.5])
    banned = LogitRules(banned=Entries.join([(0, np.array([400]))]))
    for rules, allowed in ((None, {5, 400}), (banned, {5})):
        token = (
            TorchSampler(NativeSampling(library))
            .sample(logits.clone(), inputs(1, 2.0, np.array([draw]), rules))
            .token_ids[0]
        )
        assert token in allowed


def test_the_first_of_equal_peaks_wins_and_no_number_is_the_largest(library: NativeLibrary) -> None:
    logits = torch.zeros(4, 500)
    logits[1, [300, 400]] = 2.0
    logits[2, 499] = 1.0
    logits[3, 123] = torch.nan
    sampled = TorchSampler(NativeSampling(library)).sample(logits, inputs(4, 0.0, np.zeros(4)))
    assert sampled.token_ids.tolist() == [0, 300, 499, 123]
    assert sampled.num_nans is not None
    assert sampled.num_nans.tolist() == [0, 0, 0, 1]


def test_a_draw_from_a_row_without_numbers_is_the_first_peak(library: NativeLibrary) -> None:
    logits = torch.full((2, 40), -torch.inf)
    logits[1, 3] = torch.inf
    assert TorchSampler(NativeSampling(library)).sample(logits, inputs(2, 1.0, np.full(2, 0.7))).token_ids.tolist() == [
        0,
        3,
    ]


def test_programs_give_the_same_with_more_threads_than_cores_and_others_beside_them() -> None:
    """Threads that the system suspends in the middle of a program start the next program late."""
    weight, x = torch.randn(64, 48), torch.randn(9, 48)
    expected = F.linear(x, weight)
    wrong = []

    def run() -> None:
        library = open_library("auto", 6)
        layer = torch.nn.Linear(48, 64, bias=False)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        packed = PackedLinear(library, layer)
        for i in range(400):
            rows = slice(0, 1 + i % 9)
            if not torch.allclose(packed(x[rows]), expected[rows], atol=1e-4):
                wrong.append(i)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_instruction_set_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(library_module._CAPABILITIES, "avx2", ("no_such_feature",))
    with pytest.raises(KernelsError, match="kernels.isa is 'avx2', which this processor does not support"):
        open_library("avx2", 1)


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library_module._load.cache_clear()
    structs = library_module.ffi_structs.ALL
    monkeypatch.setattr(library_module.ffi_structs, "ALL", (*structs[:-1], structs[1]))
    with pytest.raises(KernelsError, match="built from other sources"):
        open_library("baseline", 1)
    library_module._load.cache_clear()


def test_a_packed_weight_reports_its_bytes(library: NativeLibrary) -> None:
    panel = 2 * library.lanes
    assert PackedWeight(library, torch.randn(panel, 3)).num_bytes == 4 * panel * 3
    assert PackedWeight(library, torch.randn(1, 3), torch.randn(1)).num_bytes == 4 * (panel * 3 + 1)
    rounded = round_to_int8(torch.randn(panel, 3))  # of each row four bytes, and a scale
    assert PackedWeight(library, rounded).num_bytes == 4 * panel + 4 * panel


def test_a_weight_that_bfloat16_holds_is_kept_in_it_and_no_other(library: NativeLibrary) -> None:
    weight = torch.randn(40, 8)
    rounded = weight.bfloat16()
    assert PackedWeight(library, weight).dtype == torch.float32
    assert PackedWeight(library, rounded).dtype == torch.bfloat16
    assert PackedWeight(library, rounded.float()).dtype == torch.bfloat16
    almost = rounded.float()
    almost[39, 7] = 1.0 + 2**-20
    assert PackedWeight(library, almost).dtype == torch.float32
    share = 4 if library.isa == "amx" else 1  # AMX packs 8 columns as a tile of 32
    assert PackedWeight(library, rounded).num_bytes * 2 == PackedWeight(library, weight).num_bytes * share
