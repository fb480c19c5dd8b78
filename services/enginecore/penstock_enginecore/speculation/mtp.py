"""Drafts by the multi-token-prediction (MTP) layer in the served model's own checkpoint (Gloeckle et al., 2024).

Qwen3-Next and Qwen3.5 checkpoints contain such a layer: the tensors ``mtp.*``. At position i, the layer gets token i +
1 and the model's final hidden state of token i, and predicts token i + 2. For further drafts, the same layer gets its
own output in place of the model's hidden state.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig

from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.executor import Progress
from penstock_enginecore.forward.base import ForwardPass
from penstock_enginecore.forward.build import ForwardConfig
from penstock_enginecore.models.attention_hook import ATTENTION_NAME
from penstock_enginecore.models.checkpoint import weight_files
from penstock_enginecore.models.dtypes import Dtypes, narrow, resolve_dtypes
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import LoadedModel, read_config
from penstock_enginecore.models.quantization.layers import DOWN, GATE_UP
from penstock_enginecore.models.quantization.loading import without_scales
from penstock_enginecore.models.quantization.weights import StoredTensor, dense_weights, open_tensors
from penstock_enginecore.models.support import quantization_of
from penstock_enginecore.native.backend import multiplies_linears
from penstock_enginecore.speculation.eagle import Eagle
from penstock_enginecore.speculation.head import DraftHead
from penstock_enginecore.speculation.head_forward import build_head

SERVED = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Model types of text models whose MTP layers this method supports."""
_PREFIX = "mtp."
_DENSE = "layers.0.mlp.gate_proj.weight"
"""Name of a tensor that only MTP layers without experts have."""
_EXPERTS = "layers.0.mlp.experts."
_EXPERT = re.compile(r"layers\.0\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_OTHER = "set speculative.method to another method, such as ngram"
_LAYER = re.compile(r"layers\.(\d+)\.")


class MtpHead(DraftHead):
    """Module of an MTP layer. The submodules have the names that the checkpoint uses after ``mtp.``.

    The module takes the classes of layer, norm and rotary embedding from ``target``. Gated attention, norms around 1
    and experts are therefore computed as in the target's own layers.
    """

    def __init__(self, target: Any, *, has_experts: bool) -> None:
        """Args:
        target: The causal language model that verifies. The head uses the target's embedding and ``lm_head``.
        has_experts: Whether the MLP is a mixture of experts.
        """
        super().__init__()
        base, config = target.base_model, _layer_config(target.config, has_experts=has_experts)
        make_norm = type(base.norm)
        hidden = config.hidden_size

        def norm() -> nn.Module:
            return cast("nn.Module", make_norm(hidden, eps=config.rms_norm_eps))

        self.config = config
        self.states_width = hidden
        self.embed_tokens = None
        with torch.device("meta"):
            self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(), norm()
            self.fc = nn.Linear(2 * hidden, hidden, bias=False)
            self.layers = nn.ModuleList([type(base.layers[0])(config, 0)])
            self.norm = norm()
        self.rotary_emb = copy.deepcopy(base.rotary_emb)
        self._target = [target]  # store the target in a list, so that torch does not register it as a submodule

    def forward(
        self,
        embedded: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        *,
        own: bool = False,  # noqa: ARG002 - the layer treats its own output like the target's states
    ) -> torch.Tensor:
        """Return the layer's output after its last norm, ``[tokens, hidden size]``. Attention calls use the current
        context.

        Args:
            embedded: Embedded tokens ``[tokens, hidden size]``.
            states: The target's states after its last norm, or this module's output, ``[tokens, hidden size]``.
            positions: int64 ``[tokens]``.
            own: Whether ``states`` are this module's output.
        """
        normed = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)
        x = self.fc(torch.cat(normed, dim=-1))[None]
        turns = self.rotary_emb(x, positions[None])
        made: Any = self.layers[0](x, position_embeddings=turns, attention_mask=None)
        return cast("torch.Tensor", self.norm(made)[0])

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits ``[tokens, vocabulary]`` of the target's ``lm_head``."""
        return cast("torch.Tensor", self._target[0].get_output_embeddings()(states))


def _layer_config(config: PretrainedConfig, *, has_experts: bool) -> PretrainedConfig:
    """Return a copy of the target's config that describes a model with one layer, which has full attention."""
    layer = copy.deepcopy(config)
    layer.layer_types = ["full_attention"]
    layer.num_hidden_layers = 1
    if hasattr(layer, "mlp_only_layers"):
        layer.mlp_only_layers, layer.decoder_sparse_step = [] if has_experts else [0], 1
    layer._attn_implementation = ATTENTION_NAME
    return layer


# Reading of the layer from the files of the served model.


def read_mtp(target: Any, tensors: Mapping[str, torch.Tensor]) -> MtpHead:
    """Return the MTP layer of ``target`` with the weights in ``tensors``. The keys are the names in the files without
    ``mtp.``.

    Raises ModelLoadError for tensors that are missing, unknown or of a wrong shape.
    """
    tensors = _merged(tensors)
    layers = {int(found.group(1)) for name in tensors if (found := _LAYER.match(name))}
    if layers - {0}:
        raise ModelLoadError(f"the files have {max(layers) + 1} MTP layers; the method 'mtp' supports 1; {_OTHER}")
    head = MtpHead(target, has_experts=_DENSE not in tensors)
    places = {name: list(parameter.shape) for name, parameter in head.named_parameters()}
    for name in sorted(places.keys() - tensors.keys()):
        raise ModelLoadError(f"the files have no tensor {_PREFIX}{name}; take them from the checkpoint's author")
    for name in sorted(tensors.keys() - places.keys()):
        raise ModelLoadError(
            f"the files have the tensor {_PREFIX}{name}, which the method 'mtp' does not know; {_OTHER}"
        )
    for name, shape in places.items():
        if (own := list(tensors[name].shape)) != shape:
            raise ModelLoadError(
                f"the tensor {_PREFIX}{name} has shape {own} in the files, but config.json "
                f"requires {shape}; take both from the same version of the checkpoint"
            )
    head.load_state_dict(tensors, assign=True)
    return head.eval().requires_grad_(False)


def _merged(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors, with the experts in the target's layout: one tensor for all experts. Some files have a
    separate tensor for each expert.
    """
    single: dict[str, dict[int, torch.Tensor]] = {"gate_proj": {}, "up_proj": {}, "down_proj": {}}
    merged = {}
    for name, tensor in tensors.items():
        if found := _EXPERT.fullmatch(name):
            single[found.group(2)][int(found.group(1))] = tensor
        else:
            merged[name] = tensor
    if not any(single.values()):
        return merged
    count = 1 + max(max(each, default=-1) for each in single.values())
    for projection, each in single.items():
        if missing := sorted(set(range(count)) - each.keys()):
            raise ModelLoadError(f"the files have no tensor {_PREFIX}{_EXPERTS}{missing[0]}.{projection}.weight")
    gate, up, down = ([each[expert] for expert in range(count)] for each in single.values())
    try:
        merged[_EXPERTS + GATE_UP] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        merged[_EXPERTS + DOWN] = torch.stack(down)
    except RuntimeError as e:
        raise ModelLoadError(f"the tensors {_PREFIX}{_EXPERTS}* have different shapes: {e}") from e
    return merged


def _stored(config: EngineCoreConfig, dtypes: Dtypes) -> dict[str, torch.Tensor]:
    """Read the tensors ``mtp.*`` of the served model, dequantized, by their names without the prefix. Raises
    ModelLoadError.
    """
    scheme = quantization_of(read_config(config.model))
    with open_tensors(weight_files(config.model)) as every:
        stored: dict[str, StoredTensor] = {name: each for name, each in every.items() if name.startswith(_PREFIX)}
        if not stored:
            raise ModelLoadError(
                "the files have no tensors mtp.*; some copies of checkpoints leave them out: take the files from the "
                f"checkpoint's author, or {_OTHER}"
            )
        weights: Mapping[str, Any] = stored
        if scheme is not None:
            weights = dense_weights(without_scales(stored), scheme, dtypes.dense).tensors
        tensors = {name.removeprefix(_PREFIX): tensor[...] for name, tensor in weights.items()}
        return {
            name: tensor if dtypes.weights is None else tensor.to(dtypes.weights) for name, tensor in tensors.items()
        }


def load_mtp(
    config: EngineCoreConfig, model: LoadedModel, target: ForwardPass, forward: ForwardConfig, progress: Progress
) -> Eagle:
    """Load the MTP layer in the files of ``model``, whose forward pass is ``target``. Raises ModelLoadError if the
    model or its files have no MTP layer that this method supports.
    """
    where = f"speculative.method is 'mtp', and model.path is {config.model.path!r}"
    module, kind = model.module, model.module.config.model_type
    if kind not in SERVED:
        raise ModelLoadError(
            f"{where}, which is a {kind} model; the method 'mtp' supports only the model types {', '.join(SERVED)}; {_OTHER}"
        )
    if config.model.load_format == "dummy":
        raise ModelLoadError(f"{where}, but model.load_format is 'dummy', which reads no MTP layer; set it to 'auto'")
    progress(f"loading the MTP layer of {config.model.path}")
    widen = multiplies_linears(forward.kernels, forward.device, rounded=config.model.dtype == "bfloat16")
    dtypes = resolve_dtypes(config.model.dtype, read_config(config.model), forward.device, widen=widen)
    try:
        head = read_mtp(module, _stored(config, dtypes))
    except ModelLoadError as e:
        raise ModelLoadError(f"{where}: {e}") from e
    if dtypes.widens:
        narrow(head)
    built, sampler = build_head(head, model, target, replace(forward, part=None, int8=False, cache_dtype=None))
    layers = (module.config.num_hidden_layers,)
    return Eagle("mtp", built, sampler, None, model.vocab_size, layers, config.speculative.draft_sampling)
