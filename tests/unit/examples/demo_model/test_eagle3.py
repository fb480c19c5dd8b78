"""The EAGLE-3 head of the demo model: its chains, its files, its training and its measurement."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from tests.fakes.example_modules import example_modules

FOLDER = Path(__file__).resolve().parents[4] / "examples" / "demo_model"
MODEL = FOLDER / "penstock-tiny"
MODULES = ["eagle3_head", "eagle3_files", "eagle3_training", "pad_model"]
LAYER = {
    "input_layernorm.weight": [256],
    "hidden_norm.weight": [256],
    "post_attention_layernorm.weight": [256],
    "self_attn.q_proj.weight": [256, 512],
    "self_attn.k_proj.weight": [128, 512],
    "self_attn.v_proj.weight": [128, 512],
    "self_attn.o_proj.weight": [256, 256],
    "mlp.gate_proj.weight": [384, 256],
    "mlp.up_proj.weight": [384, 256],
    "mlp.down_proj.weight": [256, 384],
}
OTHERS = {
    "fc.weight": [256, 768],
    "norm.weight": [256],
    "lm_head.weight": [700, 256],
    "d2t": [700],
    "t2d": [2048],
}


@pytest.fixture(scope="module")
def demo() -> Iterator[SimpleNamespace]:
    with example_modules(FOLDER, MODULES) as modules:
        yield modules


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def head(demo: SimpleNamespace, model: LlamaForCausalLM) -> torch.nn.Module:
    """Return a head with random weights, whose vocabulary is about every third token."""
    torch.manual_seed(3)
    built = demo.eagle3_training.build_head(model, torch.randperm(2048)[:700].tolist())
    for weight in built.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    return built.eval()


def same(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    one, other = first.state_dict(), second.state_dict()
    return one.keys() == other.keys() and all(bool((one[name] == other[name]).all()) for name in one)


def a_row(count: int = 24) -> torch.Tensor:
    torch.manual_seed(7)
    return torch.randint(8, 2048, (1, count))


def aux_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    return torch.cat([states[layer] for layer in (1, 2, 3)], -1)


def test_a_chain_is_the_unrolled_one_as_long_as_it_guesses_what_the_text_has(
    demo: SimpleNamespace, model: LlamaForCausalLM, head: torch.nn.Module
) -> None:
    table, row = model.model.embed_tokens.weight, a_row()
    aux = aux_of(model, row)
    drafts, logits = head.draft(table, row[0, :11], aux[0, :10], 4)
    told = torch.cat((row[:, :11], drafts[None], row[:, :5]), 1)  # tokens after the drafts must not matter
    with torch.no_grad():
        outs = head.unroll(table[told[:, 1:]], torch.cat((aux[:, :10], aux[:, : told.shape[1] - 11]), 1), 4)
        found = torch.stack([head.logits(out[0, 9]) for out in outs])
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)
    assert head.target_tokens(found.argmax(-1)).tolist() == drafts.tolist()


def test_the_first_place_of_all_chains_is_one_pass(
    demo: SimpleNamespace, model: LlamaForCausalLM, head: torch.nn.Module
) -> None:
    table, row = model.model.embed_tokens.weight, a_row()
    aux = aux_of(model, row)[:, :-1]
    with torch.no_grad():
        whole = head(table[row[:, 1:]], head.fc(aux))
        torch.testing.assert_close(head.unroll(table[row[:, 1:]], aux, 1)[0], whole)
        part = head(table[row[:, 1:11]], head.fc(aux[:, :10]))
    # Products of other shapes round differently, by a share of the largest numbers that they add up.
    torch.testing.assert_close(part, whole[:, :10], rtol=1e-4, atol=1e-5 * whole.abs().max().item())


def test_the_layer_is_transformers_layer_where_the_token_does_not_count(
    demo: SimpleNamespace, model: LlamaForCausalLM
) -> None:
    """Set to the model's last layer over the last hidden states alone, the head's logits are the model's."""
    head = demo.eagle3_training.build_head(model, list(range(2048)))
    layer = model.state_dict()
    with torch.no_grad():
        head.fc.weight[:, :512] = 0
        head.fc.weight[:, 512:] = torch.eye(256)
        head.midlayer.hidden_norm.weight.copy_(layer["model.layers.3.input_layernorm.weight"])
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(head.midlayer.self_attn, name).weight[:, :256] = 0
        row = a_row()
        found = head.logits(head(model.model.embed_tokens(row), head.fc(aux_of(model, row))))
        torch.testing.assert_close(found, model(row).logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
def test_files(
    demo: SimpleNamespace, model: LlamaForCausalLM, head: torch.nn.Module, layout: str, tmp_path: Path
) -> None:
    demo.eagle3_files.save_head(head, tmp_path, layout, MODEL)
    prefix = {"safeailab": "midlayer.", "speculators": "layers.0."}[layout]
    tensors = load_file(tmp_path / "model.safetensors")
    shapes = {name: list(weight.shape) for name, weight in tensors.items()}
    assert shapes == {prefix + name: shape for name, shape in LAYER.items()} | OTHERS
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    targets = torch.arange(700) + tensors["d2t"]
    assert targets.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()
    again = demo.eagle3_files.load_head(tmp_path)
    assert again.config == head.config
    assert same(again, head)


def test_configs(demo: SimpleNamespace, head: torch.nn.Module, tmp_path: Path) -> None:
    demo.eagle3_files.save_head(head, tmp_path / "a", "safeailab", MODEL)
    demo.eagle3_files.save_head(head, tmp_path / "b", "speculators", MODEL)
    first = json.loads((tmp_path / "a" / "config.json").read_text())
    assert first["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (first["model_type"], first["num_hidden_layers"], first["vocab_size"]) == ("llama", 1, 2048)
    assert (first["draft_vocab_size"], first["eagle_config"]["eagle_aux_hidden_state_layer_ids"]) == (700, [1, 2, 3])
    second = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (second["architectures"], second["speculators_model_type"]) == (["Eagle3Speculator"], "eagle3")
    assert (second["draft_vocab_size"], second["target_hidden_size"]) == (700, 256)
    assert (second["norm_before_residual"], second["eagle_aux_hidden_state_layer_ids"]) == (False, [1, 2, 3])
    assert second["transformer_layer_config"]["model_type"] == "llama"
    plan = second["speculators_config"]
    assert (plan["algorithm"], plan["default_proposal_method"]) == ("eagle3", "greedy")
    assert [method["proposal_type"] for method in plan["proposal_methods"]] == ["greedy"]
    assert plan["verifier"] == {"name_or_path": "penstock-tiny", "architectures": ["LlamaForCausalLM"]}


def test_layouts_are_made_of_each_other(demo: SimpleNamespace, head: torch.nn.Module, tmp_path: Path) -> None:
    files = demo.eagle3_files
    files.save_head(head, tmp_path / "a", "safeailab", MODEL)
    files.convert(tmp_path / "a", tmp_path / "b", "speculators", MODEL)
    files.convert(tmp_path / "b", tmp_path / "c", "safeailab", MODEL)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


def test_what_is_refused(demo: SimpleNamespace, head: torch.nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="safeailab, speculators, but is 'other'"):
        demo.eagle3_files.save_head(head, tmp_path, "other", MODEL)
    with pytest.raises(ValueError, match="2 different tokens; the draft vocabulary needs 700"):
        head.set_vocabulary([3, 4])
    demo.eagle3_files.save_head(head, tmp_path, "speculators", MODEL)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"norm_before_residual": True}))
    with pytest.raises(ValueError, match="norm_before_residual"):
        demo.eagle3_files.load_head(tmp_path)
    config["transformer_layer_config"]["rope_parameters"]["rope_type"] = "yarn"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="yarn"):
        demo.eagle3_files.load_head(tmp_path)


def test_training_lowers_the_loss_and_repeats(demo: SimpleNamespace, model: LlamaForCausalLM) -> None:
    training, tokenizer = demo.eagle3_training, Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokens, share = training.frequent_tokens(tokenizer, 5, 1024)
    assert 0.9 < share < 1
    seen = training.Seen(
        model, (1, 2, 3), *next(training.micro_batches(list(islice(training.rows(tokenizer, 6, 96), 2))))
    )

    def trained(steps: int) -> torch.nn.Module:
        torch.manual_seed(1)
        built = training.build_head(model, tokens)
        if steps:
            training.train_head(model, built, tokenizer, 5, 1.0, steps)
        return built

    built = trained(3)
    with torch.no_grad():
        assert training.chain_loss(built, seen) < 0.9 * training.chain_loss(trained(0), seen)
    assert same(trained(1), trained(1))


def test_measuring(demo: SimpleNamespace, model: LlamaForCausalLM, head: torch.nn.Module) -> None:
    """A head with random weights adds almost no tokens to the one token of each step."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    found = demo.eagle3_training.measure_head(model, head, tokenizer, batches=1, size=3)
    assert 1 <= found["tokens per step, own greedy text"] < 1.3
    assert 1 <= found["tokens per step, held-out text"] < 1.3
    assert found["steps of held-out text"] > 500


def test_tokens_of_steps(demo: SimpleNamespace) -> None:
    """A text of six tokens after a prompt of three: the first comes from the prompt's step."""
    held = torch.tensor([[0, 0, 4, 4, 4, 4, 4, 4], [0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 9, 2, 9, 9, 9]])
    walked = [demo.eagle3_training.tokens_per_step(row[None], 3, [9]) for row in held]
    assert walked == [(5, 1), (5, 5), (5, 2)]


def test_a_padded_head_guesses_the_same(
    demo: SimpleNamespace, model: LlamaForCausalLM, head: torch.nn.Module, tmp_path: Path
) -> None:
    padded = demo.pad_model.pad_head(head, heads=8, kv_heads=4, width=512)
    demo.eagle3_files.save_head(padded, tmp_path, "speculators", MODEL)
    padded = demo.eagle3_files.load_head(tmp_path)
    assert padded.midlayer.self_attn.q_proj.weight.shape == (512, 512)
    row = a_row()
    aux, table = aux_of(model, row)[0, :-1], model.model.embed_tokens.weight
    drafts, logits = head.draft(table, row[0], aux, 4)
    guessed, found = padded.draft(table, row[0], aux, 4)
    assert guessed.tolist() == drafts.tolist()
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)


def test_a_padded_model_has_the_same_hidden_states(demo: SimpleNamespace, model: LlamaForCausalLM) -> None:
    """The hidden states must be equal, so that a head for the model also fits the padded model."""
    padded = demo.pad_model.pad_model(model, layers=6, heads=8, kv_heads=4, width=512)
    row = a_row()
    torch.testing.assert_close(aux_of(padded, row), aux_of(model, row), rtol=1e-4, atol=1e-4)
