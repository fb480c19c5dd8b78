"""Causal language models of text models for which transformers has none: they live in models with towers alone."""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from penstock_enginecore.models.errors import ModelLoadError

_OURS = {
    "qwen2_5_vl_text": ("qwen2_5_vl", "Qwen2_5_VL"),
    "qwen2_vl_text": ("qwen2_vl", "Qwen2VL"),
    "qwen3_vl_text": ("qwen3_vl", "Qwen3VL"),
}
"""By the model type of their configuration: transformers' package, and what its classes begin with."""


@cache
def _for_causal_lm(package: str, prefix: str) -> type[PreTrainedModel]:
    """``{prefix}ForCausalLM``: a ``{prefix}TextModel`` with a head, as transformers' own are. Positions may be
    ``[3, 1, tokens]``.
    """
    modeling: Any = import_module(f"transformers.models.{package}.modeling_{package}")
    pretrained, model_class = (getattr(modeling, f"{prefix}{kind}") for kind in ("PreTrainedModel", "TextModel"))

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
    return type(f"{prefix}ForCausalLM", (pretrained, GenerationMixin), members)


def text_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Of the configuration of a text model. Raises ModelLoadError where there is none."""
    if ours := _OURS.get(config.model_type):
        return _for_causal_lm(*ours)
    mapping: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise ModelLoadError(f"{config.model_type} is not supported: there is no causal language model for it")
    entry = mapping[type(config)]
    found: type[PreTrainedModel] = entry[0] if isinstance(entry, tuple) else entry
    return found
