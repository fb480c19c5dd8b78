"""Plan of an encoder's layers: the layers that the CPU kernels compute in one call, and the modules with their weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from penstock_enginecore.models.attention_hook import AttentionCall
from penstock_enginecore.models.decoder_plan import Activation
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.plan_reader import ACTIVATION_NAMES

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a rotary embedding, float32 ``[positions, rotary size]``."""


@dataclass(frozen=True, slots=True)
class EncoderLayerPlan:
    """Layer of an encoder.

    Attributes:
        qkv: Projections to queries, keys and values, or one projection to all of them.
        output: Projection of the attention's output.
        up: Projections to gates and to the values that the gates multiply, one projection to both, or, in an MLP
            without a gate, one projection.
        down: Last projection of the MLP.
        attention_norm: Norm after or before attention, or None.
        mlp_norm: Norm after or before the MLP.
        scaling: Factor of attention scores.
        window: Tokens attend to ``window - 1`` tokens on each side, or to all tokens if None.
        rotary: Index in ``EncoderPlan.rotaries``, or None if the layer rotates no heads.
    """

    qkv: tuple[torch.nn.Linear, ...]
    output: torch.nn.Linear
    up: tuple[torch.nn.Linear, ...]
    down: torch.nn.Linear
    attention_norm: torch.nn.Module | None
    mlp_norm: torch.nn.Module
    scaling: float
    window: int | None
    rotary: int | None = None

    @property
    def linears(self) -> list[torch.nn.Linear]:
        """All linear layers."""
        return [*self.qkv, self.output, *self.up, self.down]


@dataclass(frozen=True, slots=True)
class EncoderPlan:
    """Encoder whose layers are all alike.

    Attributes:
        words: Embeddings of token ids.
        types: Embeddings of token types, or None.
        positions: Embeddings of positions, or None.
        embedding_norm: Norm of the sum of embeddings, or None.
        final_norm: Norm of the last layer's output, or None.
        post_norm: Whether norms follow the residual additions. Otherwise norms precede attention and MLP.
        gated: Whether the MLP has a gate.
        rotaries: Functions that return the cosines and sines for the first ``positions`` positions.
    """

    layers: tuple[EncoderLayerPlan, ...]
    words: torch.nn.Embedding
    types: torch.nn.Embedding | None
    positions: torch.nn.Embedding | None
    embedding_norm: torch.nn.Module | None
    final_norm: torch.nn.Module | None
    post_norm: bool
    gated: bool
    activation: Activation
    num_heads: int
    num_kv_heads: int
    head_size: int
    rotaries: tuple[Callable[[int], Rotary], ...] = ()

    @property
    def norms(self) -> list[torch.nn.Module]:
        """All norms except the norm of the embeddings."""
        of_layers = [norm for layer in self.layers for norm in (layer.attention_norm, layer.mlp_norm)]
        return [norm for norm in (*of_layers, self.final_norm) if norm is not None]


def plan_encoder(module: PreTrainedModel, calls: Sequence[AttentionCall]) -> EncoderPlan:
    """Return the plan of an encoder. ``calls`` are the attention calls of its layers, in order.

    Raises UnsuitableError if the model has layers of another form.
    """
    model: Any = module
    read = _READERS.get(model.config.model_type)
    if read is None:
        raise UnsuitableError(f"no plan is known for the model type {model.config.model_type!r}")
    shapes = {(call.query.shape[1:], call.key.shape[1:], call.value.shape[1:]) for call in calls}
    if len(shapes) > 1 or calls[0].key.shape != calls[0].value.shape:
        raise UnsuitableError("the model's layers have heads of different shapes")
    plan = read(model, calls)
    for layer in plan.layers:
        for linear in layer.linears:
            if type(linear) is not torch.nn.Linear:
                raise UnsuitableError(f"a layer has a {type(linear).__name__} instead of a linear layer")
    return plan


def _shape(calls: Sequence[AttentionCall]) -> dict[str, Any]:
    _, heads, size = calls[0].query.shape
    return {"num_heads": heads, "num_kv_heads": calls[0].key.shape[1], "head_size": size}


def _attends(call: AttentionCall) -> dict[str, Any]:
    return {"scaling": call.params.scaling, "window": call.params.sliding_window}


def _activation(module: Any) -> Activation:
    name = getattr(module, "__name__", type(module).__name__)
    if name not in ACTIVATION_NAMES:
        raise UnsuitableError(f"the kernels do not support the activation {name}")
    return ACTIVATION_NAMES[name]


def _embeddings(embeddings: Any) -> dict[str, Any]:
    """Return the tables and the norm of embeddings in the form of BERT."""
    if getattr(embeddings, "use_task_id", False):
        raise UnsuitableError("the model adds embeddings of tasks")
    return {
        "words": embeddings.word_embeddings,
        "types": getattr(embeddings, "token_type_embeddings", None),
        "positions": getattr(embeddings, "position_embeddings", None),
        "embedding_norm": embeddings.LayerNorm,
    }


def _classic(
    model: Any, layers: Sequence[EncoderLayerPlan], activation: Any, calls: Sequence[AttentionCall]
) -> EncoderPlan:
    """Return the plan of a model whose norms come after the additions, and whose MLP has no gate, as in BERT."""
    return EncoderPlan(
        layers=tuple(layers),
        final_norm=None,
        post_norm=True,
        gated=False,
        activation=_activation(activation),
        **_embeddings(model.embeddings),
        **_shape(calls),
    )


def _bert(model: Any, calls: Sequence[AttentionCall]) -> EncoderPlan:
    if hasattr(model, "embeddings_project"):
        raise UnsuitableError("the embeddings have another size than the hidden states")
    layers = []
    for layer, call in zip(model.encoder.layer, calls, strict=True):
        heads, output = layer.attention.self, layer.attention.output
        layers.append(
            EncoderLayerPlan(
                qkv=(heads.query, heads.key, heads.value),
                output=output.dense,
                up=(layer.intermediate.dense,),
                down=layer.output.dense,
                attention_norm=output.LayerNorm,
                mlp_norm=layer.output.LayerNorm,
                **_attends(call),
            )
        )
    return _classic(model, layers, model.encoder.layer[0].intermediate.intermediate_act_fn, calls)


def _distilbert(model: Any, calls: Sequence[AttentionCall]) -> EncoderPlan:
    layers = []
    for layer, call in zip(model.transformer.layer, calls, strict=True):
        heads = layer.attention
        layers.append(
            EncoderLayerPlan(
                qkv=(heads.q_lin, heads.k_lin, heads.v_lin),
                output=heads.out_lin,
                up=(layer.ffn.lin1,),
                down=layer.ffn.lin2,
                attention_norm=layer.sa_layer_norm,
                mlp_norm=layer.output_layer_norm,
                **_attends(call),
            )
        )
    return _classic(model, layers, model.transformer.layer[0].ffn.activation, calls)


def _rotates_all(model: Any) -> tuple[Callable[[int], Rotary]]:
    return (partial(_turns, model, None),)


def _turns(model: Any, variant: str | None, positions: int) -> Rotary:
    like = torch.zeros(1, 1, 1)
    of = () if variant is None else (variant,)
    cosines, sines = model.rotary_emb(like, torch.arange(positions)[None], *of)
    return cosines[0].float().contiguous(), sines[0].float().contiguous()


def _gte(model: Any, calls: Sequence[AttentionCall]) -> EncoderPlan:
    """Return the plan of GTE, Nomic BERT and Jina Embeddings v3: norms after the additions, and rotated heads."""
    layers, gated = [], hasattr(model.layers[0].mlp, "gate_proj")
    for layer, call in zip(model.layers, calls, strict=True):
        heads, mlp = layer.self_attn, layer.mlp
        layers.append(
            EncoderLayerPlan(
                qkv=(heads.q_proj, heads.k_proj, heads.v_proj),
                output=heads.o_proj,
                up=(mlp.gate_proj, mlp.up_proj) if gated else (mlp.fc1,),
                down=mlp.down_proj if gated else mlp.fc2,
                attention_norm=layer.post_attention_layernorm,
                mlp_norm=layer.post_mlp_layernorm,
                rotary=0,
                **_attends(call),
            )
        )
    first = model.layers[0].mlp
    return EncoderPlan(
        layers=tuple(layers),
        final_norm=None,
        post_norm=True,
        gated=gated,
        activation=_activation(first.act_fn if gated else first.activation_fn),
        rotaries=_rotates_all(model),
        **_embeddings(model.embeddings),
        **_shape(calls),
    )


def _llama(model: Any, calls: Sequence[AttentionCall]) -> EncoderPlan:
    """Return the plan of EuroBERT, and of decoders of the form of Llama that attend in both directions."""
    layers = []
    for layer, call in zip(model.layers, calls, strict=True):
        heads, mlp = layer.self_attn, layer.mlp
        layers.append(
            EncoderLayerPlan(
                qkv=(heads.q_proj, heads.k_proj, heads.v_proj),
                output=heads.o_proj,
                up=(mlp.gate_proj, mlp.up_proj),
                down=mlp.down_proj,
                attention_norm=layer.input_layernorm,
                mlp_norm=layer.post_attention_layernorm,
                rotary=0,
                **_attends(call),
            )
        )
    return EncoderPlan(
        layers=tuple(layers),
        words=model.embed_tokens,
        types=None,
        positions=None,
        embedding_norm=None,
        final_norm=model.norm,
        post_norm=False,
        gated=True,
        activation=_activation(model.layers[0].mlp.act_fn),
        rotaries=_rotates_all(model),
        **_shape(calls),
    )


def _modernbert(model: Any, calls: Sequence[AttentionCall]) -> EncoderPlan:
    variants = sorted(set(model.config.layer_types))
    layers = []
    for layer, call in zip(model.layers, calls, strict=True):
        norm = None if isinstance(layer.attn_norm, torch.nn.Identity) else layer.attn_norm
        layers.append(
            EncoderLayerPlan(
                qkv=(layer.attn.Wqkv,),
                output=layer.attn.Wo,
                up=(layer.mlp.Wi,),
                down=layer.mlp.Wo,
                attention_norm=norm,
                mlp_norm=layer.mlp_norm,
                rotary=variants.index(layer.attention_type),
                **_attends(call),
            )
        )
    return EncoderPlan(
        layers=tuple(layers),
        words=model.embeddings.tok_embeddings,
        types=None,
        positions=None,
        embedding_norm=model.embeddings.norm,
        final_norm=model.final_norm,
        post_norm=False,
        gated=True,
        activation=_activation(model.layers[0].mlp.act),
        rotaries=tuple(partial(_turns, model, variant) for variant in variants),
        **_shape(calls),
    )


_READERS: dict[str, Callable[[Any, Sequence[AttentionCall]], EncoderPlan]] = {
    **dict.fromkeys(("bert", "camembert", "electra", "ernie", "roberta", "xlm-roberta"), _bert),
    "distilbert": _distilbert,
    **dict.fromkeys(("gte", "jina_embeddings_v3", "nomic_bert"), _gte),
    **dict.fromkeys(("eurobert", "llama", "mistral", "qwen2"), _llama),
    "modernbert": _modernbert,
}
"""Functions that read the plan of a model type."""
