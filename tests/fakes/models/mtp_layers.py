"""Multi-token-prediction layers for tiny checkpoints of Qwen3-Next and Qwen3.5, and their guesses in plain torch."""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.fakes.models.tiny_models import save_tiny_model

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
MIXTURES = ("qwen3_5_moe", "qwen3_next")
_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")


def random_layer(config: Any, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the tensors ``mtp.*`` of a layer for the text model with ``config``, with one tensor per expert."""
    generator = torch.Generator().manual_seed(seed)
    hidden = int(config.hidden_size)
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, int(config.head_dim)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    def norm(width: int = hidden) -> torch.Tensor:
        return 0.2 * torch.randn(width, generator=generator)

    def mlp(name: str, inner: int) -> dict[str, torch.Tensor]:
        return {
            f"{name}.gate_proj.weight": matrix(inner, hidden),
            f"{name}.up_proj.weight": matrix(inner, hidden),
            f"{name}.down_proj.weight": matrix(hidden, inner),
        }

    tensors = {
        "fc.weight": matrix(hidden, 2 * hidden),
        "pre_fc_norm_embedding.weight": norm(),
        "pre_fc_norm_hidden.weight": norm(),
        "norm.weight": norm(),
        "layers.0.input_layernorm.weight": norm(),
        "layers.0.post_attention_layernorm.weight": norm(),
        "layers.0.self_attn.q_proj.weight": matrix(2 * heads * size, hidden),
        "layers.0.self_attn.k_proj.weight": matrix(kv_heads * size, hidden),
        "layers.0.self_attn.v_proj.weight": matrix(kv_heads * size, hidden),
        "layers.0.self_attn.o_proj.weight": matrix(hidden, heads * size),
        "layers.0.self_attn.q_norm.weight": norm(size),
        "layers.0.self_attn.k_norm.weight": norm(size),
    }
    if hasattr(config, "num_experts"):
        tensors["layers.0.mlp.gate.weight"] = matrix(config.num_experts, hidden)
        tensors["layers.0.mlp.shared_expert_gate.weight"] = matrix(1, hidden)
        tensors |= mlp("layers.0.mlp.shared_expert", config.shared_expert_intermediate_size)
        for expert in range(config.num_experts):
            tensors |= mlp(f"layers.0.mlp.experts.{expert}", config.moe_intermediate_size)
    else:
        tensors |= mlp("layers.0.mlp", config.intermediate_size)
    return {f"mtp.{name}": tensor for name, tensor in tensors.items()}


def merged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with one tensor for all experts, as other checkpoints have them."""
    name = "mtp.layers.0.mlp.experts"
    found = {key: tensor for key, tensor in tensors.items() if not key.startswith(f"{name}.")}
    count = (len(tensors) - len(found)) // 3

    def of(expert: int, projection: str) -> torch.Tensor:
        return tensors[f"{name}.{expert}.{projection}.weight"]

    pairs = [torch.cat([of(expert, "gate_proj"), of(expert, "up_proj")]) for expert in range(count)]
    found[f"{name}.gate_up_proj"] = torch.stack(pairs)
    found[f"{name}.down_proj"] = torch.stack([of(expert, "down_proj") for expert in range(count)])
    return found


def add_tensors(directory: Path, tensors: dict[str, torch.Tensor | None]) -> None:
    """Add tensors to the checkpoint in ``directory``. None deletes a tensor."""
    file = directory / "model.safetensors"
    every: dict[str, Any] = {**load_file(file), **tensors}
    save_file({name: tensor for name, tensor in every.items() if tensor is not None}, file, {"format": "pt"})


def save_mtp_model(family: str, directory: Path, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Write a tiny checkpoint with a random MTP layer to ``directory`` and return transformers' model of it."""
    model = save_tiny_model(family, directory, seed=seed, **changes)
    add_tensors(directory, dict(random_layer(model.config, seed=seed)))
    return model


def save_guessable_model(family: str, directory: Path, *, share: float = 0.005, **changes: Any) -> PreTrainedModel:
    """Write a tiny checkpoint whose MTP layer often guesses right, and return transformers' model of it.

    The outputs of the model's layers are multiplied by ``share``, so the next token depends mostly on the last one. The
    MTP layer passes the embedding of the last token to its norm, which is the model's.
    """
    model = save_tiny_model(family, directory, **{"initializer_range": 0.35, **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(_OUTPUTS):
                parameter.mul_(share)
    model.save_pretrained(directory)
    guess_by_token(model, directory)
    return model


def guess_by_token(model: Any, directory: Path) -> None:
    """Add an MTP layer to the checkpoint of the text model ``model`` that uses only the last token."""
    layer, hidden = random_layer(model.config), model.config.hidden_size
    layer |= {name: torch.zeros_like(tensor) for name, tensor in layer.items() if name.endswith(_OUTPUTS)}
    layer["mtp.fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    layer["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(hidden)
    layer["mtp.norm.weight"] = model.base_model.norm.weight.detach().float().clone()
    add_tensors(directory, dict(layer))


class Reference:
    """Reference for the guesses of an MTP layer, recomputed from scratch for each guess."""

    def __init__(self, target: Path) -> None:
        made: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
        self._target, self._config = made.eval(), made.config
        tensors = load_file(target / "model.safetensors")
        self._weights = {
            name.removeprefix("mtp."): each.float() for name, each in tensors.items() if name.startswith("mtp.")
        }

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """The likeliest ``count`` tokens behind ``token_ids``, the last of which the target has not seen."""
        states = self._target.model(torch.tensor([token_ids[:-1]])).last_hidden_state[0]
        tokens, found = list(token_ids[1:]), list[int]()
        for _ in range(count):
            out = self._layer(self._target.get_input_embeddings()(torch.tensor(tokens)), states)
            found.append(int(self._target.get_output_embeddings()(out[-1]).argmax()))
            tokens.append(found[-1])
            states = torch.cat([states, out[-1:]])
        return found

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = 1 + self._weights[f"{name}.weight"]
        return functional.rms_norm(x, x.shape[-1:], weight, self._config.rms_norm_eps)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self._weights[f"{name}.weight"].T

    def _mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gated = functional.silu(self._linear(x, f"{name}.gate_proj")) * self._linear(x, f"{name}.up_proj")
        return self._linear(gated, f"{name}.down_proj")

    def _layer(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self._norm(embedded, "pre_fc_norm_embedding"), self._norm(states, "pre_fc_norm_hidden")], -1)
        x = self._linear(both, "fc")
        x = x + self._attention(self._norm(x, "layers.0.input_layernorm"))
        normed = self._norm(x, "layers.0.post_attention_layernorm")
        x = x + (self._experts(normed) if hasattr(self._config, "num_experts") else self._mlp(normed, "layers.0.mlp"))
        return self._norm(x, "norm")

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        config, name, count = self._config, "layers.0.self_attn", len(x)
        size = config.head_dim
        query, gate = self._linear(x, f"{name}.q_proj").view(count, -1, 2 * size).chunk(2, dim=-1)
        key, value = (self._linear(x, f"{name}.{each}_proj").view(count, -1, size) for each in "kv")
        query, key = self._norm(query, f"{name}.q_norm"), self._norm(key, f"{name}.k_norm")
        query, key = self._turned(query), self._turned(key)
        shared = config.num_attention_heads // config.num_key_value_heads
        mixed = functional.scaled_dot_product_attention(
            query.transpose(0, 1),
            key.transpose(0, 1).repeat_interleave(shared, 0),
            value.transpose(0, 1).repeat_interleave(shared, 0),
            is_causal=True,
        )
        gated = mixed.transpose(0, 1) * torch.sigmoid(gate)
        return self._linear(gated.reshape(count, -1), f"{name}.o_proj")

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` ``[tokens, heads, size]`` with the first elements of each head rotated by its position."""
        rope = self._config.rope_parameters
        size = int(self._config.head_dim * rope.get("partial_rotary_factor", 1.0))
        angles = torch.arange(len(x))[:, None] / rope["rope_theta"] ** (torch.arange(0, size, 2) / size)
        cosines, sines = (each.repeat(1, 2)[:, None] for each in (angles.cos(), angles.sin()))
        turned, rest = x[..., :size], x[..., size:]
        halves = torch.cat([-turned[..., size // 2 :], turned[..., : size // 2]], -1)
        return torch.cat([turned * cosines + halves * sines, rest], -1)

    def _experts(self, x: torch.Tensor) -> torch.Tensor:
        name = "layers.0.mlp"
        scores, chosen = self._linear(x, f"{name}.gate").softmax(-1).topk(self._config.num_experts_per_tok)
        scores = scores / scores.sum(-1, keepdim=True)
        rows = [
            sum(
                score * self._mlp(row, f"{name}.experts.{expert}")
                for score, expert in zip(own, experts.tolist(), strict=True)
            )
            for row, own, experts in zip(x, scores, chosen, strict=True)
        ]
        shared = torch.sigmoid(self._linear(x, f"{name}.shared_expert_gate")) * self._mlp(x, f"{name}.shared_expert")
        return torch.stack(rows) + shared
