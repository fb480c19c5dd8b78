"""Classification heads: transformers' own modules, run on hidden states that are there already."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from penstock_enginecore.models.errors import ModelLoadError

Activation = Literal["none", "sigmoid", "softmax"]

_SCORE_ACTIVATIONS: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid"}


@dataclass(frozen=True, slots=True)
class Head:
    """What follows the hidden states. ``per_token``: it classifies tokens, not prompts.

    ``score_activation`` is that of pairs, for the one label of a cross-encoder; None where the model has more labels.
    """

    classifier: PreTrainedModel
    per_token: bool
    activation: Activation
    score_activation: Activation | None

    def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of a prompt, float32: ``[num_labels]``, or ``[tokens, num_labels]`` of a head per token.

        ``token_ids`` int64 ``[tokens]``, ``hidden`` ``[tokens, hidden size]``.
        """
        backbone: Any = getattr(self.classifier, self.classifier.base_model_prefix)
        backbone.hidden = hidden[None]
        logits: torch.Tensor = self.classifier(input_ids=token_ids[None]).logits
        backbone.hidden = None
        return logits[0].float()


def activate(scores: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Scores ``[..., labels]`` as probabilities."""
    if activation == "sigmoid":
        return scores.sigmoid()
    return scores.softmax(dim=-1) if activation == "softmax" else scores


def split_head(model: PreTrainedModel) -> tuple[PreTrainedModel, Head]:
    """Take a classifier apart: the model that gives hidden states, and the head, which now takes them as they are.

    Raises ModelLoadError for a class that does not keep the two apart.
    """
    prefix = model.base_model_prefix
    backbone = getattr(model, prefix, None)
    if not isinstance(backbone, PreTrainedModel):
        raise ModelLoadError(f"{type(model).__name__} is not supported: it has no base model of its own to take apart")
    setattr(model, prefix, _Computed(getattr(backbone, "pooler", None)))
    per_token = type(model).__name__.endswith("ForTokenClassification")
    head = Head(
        classifier=model,
        per_token=per_token,
        activation="softmax" if per_token else _activation(model.config),
        score_activation=_score_activation(model.config) if not per_token and model.config.num_labels == 1 else None,
    )
    return backbone, head


def _activation(config: PretrainedConfig) -> Activation:
    """As transformers' pipeline for text classification does."""
    if config.problem_type == "regression":
        return "none"
    return "sigmoid" if config.problem_type == "multi_label_classification" or config.num_labels == 1 else "softmax"


def _score_activation(config: PretrainedConfig) -> Activation:
    """As sentence-transformers' CrossEncoder does: sigmoid, unless the configuration names another."""
    settings = getattr(config, "sentence_transformers", None) or {}
    named = settings.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None)
    if named is None:
        return "sigmoid"
    kind = str(named).rpartition(".")[2]
    if kind not in _SCORE_ACTIVATIONS:
        raise ModelLoadError(f"the configuration's activation_fn is {named!r}; served: {', '.join(_SCORE_ACTIVATIONS)}")
    return _SCORE_ACTIVATIONS[kind]


class _Computed(torch.nn.Module):
    """Stands in for the base model inside its classifier: returns the hidden states it was given."""

    def __init__(self, pooler: torch.nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler
        self.hidden: torch.Tensor | None = None

    def forward(self, *_: object, **__: object) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """The hidden states ``[1, tokens, hidden size]``, through the model's pooler where it has one."""
        pooled = self.pooler(self.hidden) if self.pooler is not None else None
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=self.hidden, pooler_output=pooled)
