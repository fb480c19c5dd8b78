"""EAGLE heads with random weights in both layouts, and their guesses in plain torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

LAYOUTS = ("SafeAILab", "speculators")
_HEADS, _KV_HEADS, _SIZE, _INNER, _EPS, _THETA = 4, 2, 16, 96, 1e-5, 10000.0


@dataclass(frozen=True)
class Head:
    """Weights under SafeAILab's names. ``tokens`` maps the head's token ids to the target's; None if they are equal."""

    kind: str
    weights: dict[str, torch.Tensor]
    layers: tuple[int, ...]
    normed_residual: bool = False
    tokens: torch.Tensor | None = None


def random_head(
    kind: str, *, hidden: int, vocab: int, layers: tuple[int, ...] = (), normed_residual: bool = False, seed: int = 0
) -> Head:
    """Return a head for a target with these sizes. The draft vocabulary is every second token (EAGLE-3) or all (EAGLE)."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(hidden, generator=generator)

    inputs, prefix = (2 * hidden, "midlayer") if kind == "eagle3" else (hidden, "layers.0")
    weights = {
        "fc.weight": matrix(hidden, len(layers) * hidden if kind == "eagle3" else 2 * hidden),
        f"{prefix}.self_attn.q_proj.weight": matrix(_HEADS * _SIZE, inputs),
        f"{prefix}.self_attn.k_proj.weight": matrix(_KV_HEADS * _SIZE, inputs),
        f"{prefix}.self_attn.v_proj.weight": matrix(_KV_HEADS * _SIZE, inputs),
        f"{prefix}.self_attn.o_proj.weight": matrix(hidden, _HEADS * _SIZE),
        f"{prefix}.mlp.gate_proj.weight": matrix(_INNER, hidden),
        f"{prefix}.mlp.up_proj.weight": matrix(_INNER, hidden),
        f"{prefix}.mlp.down_proj.weight": matrix(hidden, _INNER),
        f"{prefix}.post_attention_layernorm.weight": norm(),
    }
    if kind == "eagle":
        return Head(kind, weights | {"fc.bias": norm()}, layers)
    tokens = torch.arange(0, vocab, 2)
    weights |= {
        f"{prefix}.hidden_norm.weight": norm(),
        f"{prefix}.input_layernorm.weight": norm(),
        "norm.weight": norm(),
    }
    return Head(kind, weights | {"lm_head.weight": matrix(len(tokens), hidden)}, layers, normed_residual, tokens)


def save_head(head: Head, directory: Path, layout: str, *, hidden: int, vocab: int, **changes: Any) -> None:
    """Write a head to ``directory``. ``changes``: changed fields of its ``config.json``."""
    layer = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": _INNER,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _SIZE,
        "num_hidden_layers": 1,
        "rms_norm_eps": _EPS,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": _THETA},
    }
    tensors = dict(head.weights)
    config: dict[str, Any] = {}
    if head.tokens is not None:
        tensors["d2t"] = head.tokens - torch.arange(len(head.tokens))
        tensors["t2d"] = torch.isin(torch.arange(vocab), head.tokens)
        config |= {"draft_vocab_size": len(head.tokens), "norm_before_residual": head.normed_residual}
    if layout == "SafeAILab":
        config |= layer | {"architectures": ["LlamaForCausalLMEagle3" if head.kind == "eagle3" else "LlamaForCausalLM"]}
        if head.kind == "eagle3":
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(head.layers)}
    else:
        first = (
            {"midlayer.": "layers.0."} if head.kind == "eagle3" else {"layers.0.": "transformer.", "fc.": "fusion_fc."}
        )
        for ours, theirs in first.items():
            tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
        config |= {"speculators_model_type": head.kind, "transformer_layer_config": layer, "fusion_bias": True}
        if head.kind == "eagle3":
            config["eagle_aux_hidden_state_layer_ids"] = list(head.layers)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config | changes))
    save_file(tensors, directory / "model.safetensors")


class Reference:
    """Reference for the guesses of a head after tokens of a target, recomputed from scratch for each guess."""

    def __init__(self, target: Path, head: Head) -> None:
        made: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
        self._target, self._head = made.eval(), head
        self._weights = {name.replace("midlayer", "layers.0"): each for name, each in head.weights.items()}

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """Return the ``count`` greedy drafts after ``token_ids``. The target has not computed the last of
        ``token_ids``.
        """
        given = self._target(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
        states = torch.cat([given[layer][0] for layer in self._head.layers or (len(given) - 1,)], dim=-1)
        if self._head.kind == "eagle3":
            states = states @ self._weights["fc.weight"].T
        tokens, found = list(token_ids[1:]), list[int]()
        for _ in range(count):
            out = self._layer(self._target.get_input_embeddings()(torch.tensor(tokens)), states)
            token = int(self._logits(out[-1]).argmax())
            found.append(token if self._head.tokens is None else int(self._head.tokens[token]))
            tokens.append(found[-1])
            states = torch.cat([states, out[-1:]])
        return found

    def _logits(self, out: torch.Tensor) -> torch.Tensor:
        if self._head.kind == "eagle":
            return self._target.get_output_embeddings()(out)
        return self._norm(out, "norm.weight") @ self._weights["lm_head.weight"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self._weights[name], _EPS)

    def _layer(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        w = {name.removeprefix("layers.0."): each for name, each in self._weights.items()}
        if self._head.kind == "eagle":
            inputs = around = torch.cat([embedded, states], -1) @ w["fc.weight"].T + w["fc.bias"]
        else:
            normed = self._norm(states, "layers.0.hidden_norm.weight")
            inputs = torch.cat([self._norm(embedded, "layers.0.input_layernorm.weight"), normed], -1)
            around = normed if self._head.normed_residual else states
        count = len(inputs)
        q, k, v = ((inputs @ w[f"self_attn.{x}_proj.weight"].T).view(count, -1, _SIZE).transpose(0, 1) for x in "qkv")
        angles = torch.arange(count)[:, None] / _THETA ** (torch.arange(0, _SIZE, 2) / _SIZE)
        cosines, sines = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        q, k = (x * cosines + torch.cat([-x[..., _SIZE // 2 :], x[..., : _SIZE // 2]], -1) * sines for x in (q, k))
        shared = _HEADS // _KV_HEADS
        mixed = functional.scaled_dot_product_attention(
            q, k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0), is_causal=True
        )
        x = around + mixed.transpose(0, 1).reshape(count, -1) @ w["self_attn.o_proj.weight"].T
        normed = self._norm(x, "layers.0.post_attention_layernorm.weight")
        gated = functional.silu(normed @ w["mlp.gate_proj.weight"].T) * (normed @ w["mlp.up_proj.weight"].T)
        return x + gated @ w["mlp.down_proj.weight"].T
