"""Causal language models of text models for which transformers has none: they live in models with towers alone."""

from typing import Any

import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto import AutoModelForCausalLM
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from penstock_enginecore.models.errors import ModelLoadError


def _for_causal_lm(name: str, pretrained: Any, model_class: Any) -> type[PreTrainedModel]:
    """A class called ``name``: a ``model`` of ``model_class`` with a head, as transformers' own are. Positions may be
    ``[3, 1, tokens]``.
    """

    def init(self: Any, config: Any) -> None:
        pretrained.__init__(self, config)
        self.model = model_class(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self: Any, *, logits_to_keep: int | torch.Tensor = 0, **inputs: Any) -> CausalLMOutputWithPast:
        output = self.model(**inputs)
        rows = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, rows])
        return CausalLMOutputWithPast(
            logits=logits, past_key_values=output.past_key_values, hidden_states=output.hidden_states
        )

    members = {
        "__init__": init,
        "__module__": __name__,
        "base_model_prefix": "model",
        "forward": forward,
        "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
        "_tp_plan": {"lm_head": "colwise_gather_output"},
    }
    return type(name, (pretrained, GenerationMixin), members)


_OURS = {
    "qwen2_5_vl_text": _for_causal_lm(
        "Qwen2_5_VLForCausalLM", qwen2_5_vl.Qwen2_5_VLPreTrainedModel, qwen2_5_vl.Qwen2_5_VLTextModel
    ),
    "qwen2_vl_text": _for_causal_lm("Qwen2VLForCausalLM", qwen2_vl.Qwen2VLPreTrainedModel, qwen2_vl.Qwen2VLTextModel),
    "qwen3_vl_text": _for_causal_lm("Qwen3VLForCausalLM", qwen3_vl.Qwen3VLPreTrainedModel, qwen3_vl.Qwen3VLTextModel),
}


def text_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Of the configuration of a text model. Raises ModelLoadError where there is none."""
    if ours := _OURS.get(config.model_type):
        return ours
    mapping: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise ModelLoadError(f"{config.model_type} is not supported: there is no causal language model for it")
    entry = mapping[type(config)]
    found: type[PreTrainedModel] = entry[0] if isinstance(entry, tuple) else entry
    return found
