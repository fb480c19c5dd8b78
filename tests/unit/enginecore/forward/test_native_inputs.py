"""Embedding rows and rotary tables that the native decoder reads from memory; invalid indices are refused."""

import numpy as np
import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from penstock_enginecore.forward import native_inputs
from penstock_enginecore.forward.native_inputs import EmbeddingLookup, Rotaries, Turns
from penstock_enginecore.models.dtypes import NarrowWeight


def embedding(dtype: torch.dtype = torch.float32) -> torch.nn.Embedding:
    torch.manual_seed(0)
    return torch.nn.Embedding(7, 4, dtype=dtype).requires_grad_(requires_grad=False)


def double(positions: torch.Tensor, like: torch.Tensor) -> Turns:
    angles = positions[:, None].float().expand(-1, 2).contiguous()
    return angles.cos(), angles.sin(), None


@pytest.mark.parametrize("token_ids", [[-1], [7], [0, 3, 2**40], [-(2**40), 1]])
def test_a_token_id_that_is_none_is_refused(token_ids: list[int]) -> None:
    with pytest.raises(IndexError, match=r"a token id is out of range: .*, allowed are 0 to 6"):
        EmbeddingLookup(embedding()).rows(np.array(token_ids))


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, 0), (torch.bfloat16, 1)])
def test_rows_of_a_plain_embedding_are_looked_up_where_they_are(dtype: torch.dtype, kind: int) -> None:
    of = embedding(dtype)
    rows = EmbeddingLookup(of).rows(np.array([0, 6]))
    assert rows is not None
    assert (rows.pointer, rows.kind) == (of.weight.data_ptr(), kind)
    assert EmbeddingLookup(of).rows(np.zeros(0, dtype=np.int64)) is not None


def test_of_a_weight_kept_in_16_bits_these_are_read() -> None:
    of = embedding(torch.bfloat16)
    kept = of.weight.detach()
    of.weight = torch.nn.Parameter(NarrowWeight(kept), requires_grad=False)
    rows = EmbeddingLookup(of).rows(np.array([1]))
    assert rows is not None
    assert (rows.pointer, rows.kind) == (kept.data_ptr(), 1)


@pytest.mark.parametrize("narrow", [False, True])
def test_rows_that_are_only_scaled_are_looked_up_with_their_scale(narrow: bool) -> None:
    of = Gemma3TextScaledWordEmbedding(7, 4, padding_idx=0, embed_scale=1.7).requires_grad_(requires_grad=False)
    ids = np.array([1, 5])
    if narrow:
        of.weight = torch.nn.Parameter(NarrowWeight(of.weight.detach().bfloat16()), requires_grad=False)
    rows = EmbeddingLookup(of).rows(ids)
    assert rows is not None
    assert isinstance(rows.table, torch.Tensor)
    assert torch.equal(rows.table[ids].float() * torch.tensor(rows.scale), of(torch.from_numpy(ids)))
    if not narrow:  # in bfloat16, torch rounds products, and the kernels do not
        assert EmbeddingLookup(of.bfloat16()).rows(ids) is None


def test_embeddings_that_do_more_are_computed_by_their_modules() -> None:
    class Scaled(torch.nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
            return 2.0 * super().forward(input)

    hooked, normed, half = embedding(), embedding(), embedding(torch.float16)
    hooked.register_forward_hook(lambda module, args, output: output + 1.0)
    normed.max_norm = 1.0
    scaled = Scaled(7, 4).requires_grad_(requires_grad=False)
    ids = np.array([3, 5])
    for of in (hooked, normed, half, scaled):
        lookup = EmbeddingLookup(of)
        assert lookup.rows(ids) is None
        assert torch.equal(lookup.of(ids), of(torch.from_numpy(ids)).float())


@pytest.mark.parametrize("kept", [True, False])
def test_turns_of_positions_are_the_modules(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kept:
        monkeypatch.setattr(native_inputs, "_MAX_TABLE_BYTES", 0)
    rotaries = Rotaries([double, lambda at, like: double(3 * at, like)], 2, 16)
    positions = np.array([0, 15, 7, 7])
    step = rotaries.of(positions, torch.empty(0))
    for factor, (cosines, sines, _), struct in zip((1, 3), step.turns, step.structs, strict=True):
        expected = double(factor * torch.from_numpy(positions), torch.empty(0))
        assert torch.equal(cosines[step.positions], expected[0])
        assert torch.equal(sines[step.positions], expected[1])
        assert (struct.cosines, struct.sines, struct.query_scales) == (cosines.data_ptr(), sines.data_ptr(), None)


@pytest.mark.parametrize("position", [-1, 16])
def test_a_position_behind_the_last_one_is_refused(position: int) -> None:
    with pytest.raises(IndexError, match=r"a position is out of range: .*, allowed are 0 to 15"):
        Rotaries([double], 2, 16).of(np.array([position]), torch.empty(0))
