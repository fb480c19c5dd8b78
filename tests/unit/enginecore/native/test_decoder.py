"""The decoder of the kernels against the model's own modules, on every instruction set, by steps as an engine makes them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock_enginecore.attention.base import AttentionMetadata
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.forward.base import ChainedDraws, ForwardBatch, ForwardPass
from penstock_enginecore.forward.build import ForwardConfig, build_forward
from penstock_enginecore.forward.modules import ModulesForward, probe_model
from penstock_enginecore.forward.native import NativeForward
from penstock_enginecore.models.loader import LoadedModel, load_model
from tests.emulation.build import pretend
from tests.fakes.engines.instruction_sets import runnable
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_narrow_model

CPU = torch.device("cpu")
BLOCK_SIZE, BLOCKS_OF_A_REQUEST = 16, 6
LENGTHS = (1, 5, 17, 40, 90)
MODELS = {
    "exaone4": {},
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0, "vocab_size": 333},
    "gemma3": {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma4": {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma4_moe": {"num_experts": 8, "top_k_experts": 3},
    "gemma4_shared": {"hidden_size_per_layer_input": 20},
    "glm4": {},
    "glm4_moe": {"num_hidden_layers": 3},
    "gpt_neox": {},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "llama4_text": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "olmo2": {},
    "olmoe": {
        "num_experts": 37,
        "num_experts_per_tok": 5,
        "hidden_size": 80,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
    },
    "phi": {
        "qk_layernorm": True,
        "hidden_act": "gelu",
        "hidden_size": 80,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
    },
    "phi3": {},
    "qwen2_moe": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "mlp_only_layers": [1], "num_hidden_layers": 3},
    "starcoder2": {"hidden_act": "relu", "vocab_size": 333},
}
"""Models that together cover the decoder's special cases.

- Norms after the residual addition, and norms over all heads.
- Layers without positions, and several rotary embeddings.
- Caps of logits, fused projections, and sizes that are no multiples of a vector's length.
- Heads of several shapes, values that are the keys, and factors of layers' outputs.
- Dense layers next to mixtures of experts, and mixtures beside dense MLPs in the same layer.
- Experts with biases and a clamped gate, experts whose inputs are scaled, shared experts with and without a gate, and
  routers that choose groups of experts.
- Rotation of neighbouring elements, of a part of each head, and before the norms of queries and keys.
- Queries scaled by position, norms that subtract the mean, and attention and MLP with the same input.
- Activations without a gate, and projections grouped by head.
- Layers that share keys and values, with wider MLPs, and embeddings of token ids in each layer.
"""
ROUNDED = {"amx", "avx512_bf16"}


def load(path: Path) -> LoadedModel:
    return load_model(ModelConfig(path=str(path)), CPU, lambda line: None, widen=True)


def build(path: Path, isa: str, *, threads: int = 3, rounded: bool = False) -> ForwardPass:
    config = ForwardConfig(CPU, "auto", KernelsConfig(isa=isa), threads, BLOCK_SIZE, rounded=rounded)
    forward = build_forward(load(path), config).forward
    assert isinstance(forward, NativeForward)
    return forward


def step(lengths: Sequence[int], done: Sequence[int], ids: Sequence[np.ndarray]) -> ForwardBatch:
    """Return a step of requests with ``lengths`` new tokens after ``done`` computed ones."""
    table = np.arange(1, 1 + len(ids) * BLOCKS_OF_A_REQUEST, dtype=np.int32).reshape(len(ids), BLOCKS_OF_A_REQUEST)
    positions = [np.arange(before, before + count) for before, count in zip(done, lengths, strict=True)]
    slots = [
        row[at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE
        for row, at in zip(table, positions, strict=True)
    ]
    starts = np.array([0, *accumulate(lengths)], dtype=np.int64)
    ends = np.array([before + count for before, count in zip(done, lengths, strict=True)], dtype=np.int64)
    metadata = AttentionMetadata(starts, ends, table, np.concatenate(slots), BLOCK_SIZE)
    tokens = [of[before : before + count] for of, before, count in zip(ids, done, lengths, strict=True)]
    return ForwardBatch(np.concatenate(tokens), np.concatenate(positions), [metadata])


def prompts(vocab_size: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(1, vocab_size, length) for length in LENGTHS]


def run(forward: ForwardPass, vocab_size: int, cuts: Sequence[int], *, together: bool = True) -> torch.Tensor:
    """Logits of all tokens of the prompts, one prompt after the other: steps have all prompts, cut at ``cuts``, or each alone."""
    ids = prompts(vocab_size)
    forward.bind(forward.memory.throwaway(BLOCK_SIZE, 1 + len(ids) * BLOCKS_OF_A_REQUEST))
    found: list[list[torch.Tensor]] = [[] for _ in ids]
    with torch.inference_mode():
        for group in [range(len(ids))] if together else [[index] for index in range(len(ids))]:
            some = [ids[index] for index in group]
            done = [0] * len(some)
            for cut in [*cuts, max(LENGTHS)]:
                lengths = [max(0, min(cut, len(each)) - before) for each, before in zip(some, done, strict=True)]
                keep = [index for index, length in enumerate(lengths) if length]
                if not keep:
                    continue
                # All requests keep their blocks. A request without tokens in this step is left out of the batch.
                batch = _only(step(lengths, done, some), keep)
                logits = forward.run(batch, np.arange(len(batch.token_ids))).logits
                for index, part in zip(keep, logits.split([lengths[index] for index in keep]), strict=True):
                    found[group[index]].append(part.clone())
                done = [before + length for before, length in zip(done, lengths, strict=True)]
    forward.bind({})
    return torch.cat([torch.cat(parts) for parts in found])


def _only(batch: ForwardBatch, keep: list[int]) -> ForwardBatch:
    [of] = batch.attention
    starts = np.array([0, *accumulate(int(np.diff(of.query_start_loc)[index]) for index in keep)], dtype=np.int64)
    metadata = AttentionMetadata(starts, of.seq_lens[keep], of.block_table[keep].copy(), of.slot_mapping, of.block_size)
    return ForwardBatch(batch.token_ids, batch.positions, [metadata])


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp(request.param)
    save_narrow_model(request.param, directory, **{"hidden_size": 64, **MODELS[request.param]})
    return directory


@pytest.fixture(scope="module")
def expected(path: Path) -> torch.Tensor:
    """Return the modules' logits for whole prompts."""
    model = load(path)
    reference = ModulesForward(probe_model(model, CPU, BLOCK_SIZE), create_backend("reference", CPU))
    return run(reference, model.vocab_size, ())


@pytest.mark.each_value
@pytest.mark.parametrize("isa", runnable())
def test_logits_are_those_of_the_modules_and_the_same_bits_however_the_steps_are_cut(
    path: Path, expected: torch.Tensor, isa: str
) -> None:
    vocab_size = expected.shape[1]
    forward = build(path, isa)
    whole = run(forward, vocab_size, ())
    torch.testing.assert_close(whole, expected, rtol=1e-3, atol=1e-3)
    for cuts in ((1, 2, 3, 20, 21, 64), (16, 48)):
        assert torch.equal(run(forward, vocab_size, cuts), whole)
    assert torch.equal(run(forward, vocab_size, (33,), together=False), whole)
    assert torch.equal(run(build(path, isa, threads=1), vocab_size, (7,)), whole)


@pytest.mark.each_value
@pytest.mark.parametrize("isa", sorted(ROUNDED))
def test_rounded_inputs_give_the_same_bits_too_and_are_near(
    path: Path, expected: torch.Tensor, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, isa)
    forward = build(path, isa, rounded=True)
    whole = run(forward, expected.shape[1], ())
    assert 1e-5 < float((whole - expected).norm() / expected.norm()) < 0.1
    assert torch.equal(run(forward, expected.shape[1], (1, 17, 40)), whole)
    assert torch.equal(run(forward, expected.shape[1], (), together=False), whole)


def test_rows_whose_logits_are_wanted_are_the_same_bits_as_with_all_states_kept(path: Path) -> None:
    forward = build(path, "auto")
    ids = prompts(VOCAB_SIZE)
    batch = step(LENGTHS, [0] * len(ids), ids)
    forward.bind(forward.memory.throwaway(BLOCK_SIZE, 1 + len(ids) * BLOCKS_OF_A_REQUEST))
    with torch.inference_mode():
        rows = np.array([0, 30, 70, len(batch.token_ids) - 1])
        kept = forward.run(batch, rows, keep_states=True)
        few = forward.run(batch, rows)
        none = forward.run(batch, rows[:0])
        headed = forward.head(kept.states, torch.from_numpy(rows))
    assert few.states is None
    assert none.logits.shape == (0, few.logits.shape[1])
    assert torch.equal(few.logits, kept.logits)
    assert torch.equal(headed, kept.logits)


def test_a_layer_that_adds_no_number_poisons_its_own_request_alone(path: Path) -> None:
    forward = build(path, "auto")
    ids = prompts(VOCAB_SIZE)
    batch = step(LENGTHS, [0] * len(ids), ids)
    rows = np.cumsum(LENGTHS) - 1
    forward.bind(forward.memory.throwaway(BLOCK_SIZE, 1 + len(ids) * BLOCKS_OF_A_REQUEST))
    with torch.inference_mode():
        clean = forward.run(batch, rows).logits
        embedded = forward.embed(batch.token_ids)
        embedded[3] = torch.nan  # of the second prompt
        poisoned = ForwardBatch(batch.token_ids, batch.positions, batch.attention, embedded)
        logits = forward.run(poisoned, rows).logits
    assert logits[1].isnan().all()
    for row in (0, 2, 3, 4):
        assert torch.equal(logits[row], clean[row])


@pytest.mark.parametrize("path", ["gemma4", "gemma4_shared"], indirect=True)
def test_a_chain_gives_the_tokens_of_its_steps(path: Path) -> None:
    count, ids = 6, prompts(VOCAB_SIZE)[1:4]
    forward = build(path, "auto")
    assert isinstance(forward, NativeForward)
    assert forward.chains
    forward.bind(forward.memory.throwaway(BLOCK_SIZE, 1 + len(ids) * BLOCKS_OF_A_REQUEST))
    lengths = [len(each) for each in ids]
    counts = np.full(len(ids), count)
    draws = ChainedDraws(counts, np.zeros(len(ids), np.float32), np.zeros((count, len(ids))), VOCAB_SIZE)
    with torch.inference_mode():
        chained = forward.chain(step(lengths, [0] * len(ids), ids), draws)
        tokens, done, found = ids, [0] * len(ids), []
        for _ in range(count):
            new = [len(each) - before for each, before in zip(tokens, done, strict=True)]
            batch = step(new, done, tokens)
            found.append(forward.run(batch, batch.attention[0].query_start_loc[1:] - 1).logits.argmax(1).numpy())
            done = [len(each) for each in tokens]
            tokens = [np.append(each, token) for each, token in zip(tokens, found[-1], strict=True)]
        with pytest.raises(IndexError, match=f"embeddings of {VOCAB_SIZE + 1} "):
            forward.chain(step(lengths, [0] * len(ids), ids), replace(draws, vocab_size=VOCAB_SIZE + 1))
    assert np.array_equal(chained, np.stack(found))
