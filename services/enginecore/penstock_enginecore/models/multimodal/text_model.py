"""Text model inside a composite model: its module, and a causal language model class for it."""

from functools import cache
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.support import Probed, most_differ, probe

# Search for the text model's module inside a composite model.


class TextPart(NamedTuple):
    """Text model of a composite model.

    Attributes:
        name: Name of the text model's module.
        module: The text model, with or without its output head.
        head: Name of the output head's module.
    """

    name: str
    module: PreTrainedModel
    head: str

    @property
    def has_head(self) -> bool:
        """Whether the output head is part of the text model's module."""
        return self.head.startswith(f"{self.name}.")


def text_part(whole: PreTrainedModel) -> TextPart:
    """Return the text model of a composite. Raises ModelLoadError, with the composite's class name, if the text model
    cannot be identified.

    The text model is the only outermost module whose configuration has the type of the text model's configuration.
    """
    kind, wanted = type(whole).__name__, type(whole.config.get_text_config())
    found: dict[str, PreTrainedModel] = {}
    for name, module in whole.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not inside and isinstance(module, PreTrainedModel) and type(module.config) is wanted:
            found[name] = module
    if len(found) != 1:
        owners = f"modules {' and '.join(found)} have" if found else "no module has"
        raise ModelLoadError(
            f"{kind} is not supported: its text model cannot be identified, because {owners} a {wanted.__name__}"
        )
    untyped: Any = whole
    head = untyped.get_output_embeddings()
    heads = [name for name, module in whole.named_modules() if module is head]
    if len(heads) != 1:
        raise ModelLoadError(f"{kind} is not supported: the output head of its text model cannot be identified")
    ((name, part),) = found.items()
    return TextPart(name, part, heads[0])


def remove_others(whole: PreTrainedModel, part: TextPart) -> list[str]:
    """Remove all modules of ``whole`` except the text model and its head. Returns the names of the removed modules."""
    kept = (part.name,) if part.has_head else (part.name, part.head)
    removed: list[str] = []
    for parent in sorted({around for name in kept for around in _around(name)}):
        modules = whole.get_submodule(parent)._modules
        for child in list(modules):
            name = f"{parent}.{child}" if parent else child
            if not any(f"{each}.".startswith(f"{name}.") for each in kept):
                del modules[child]
                removed.append(name)
    return removed


def _around(name: str) -> list[str]:
    """Return the names of all modules that contain the module ``name``, from the outermost module to the innermost."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))]


# Causal language model classes for text models. transformers has no such class for text models that are only part of
# composite models.


@cache
def for_causal_lm(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a class ``{prefix}ForCausalLM`` for ``{prefix}TextModel``: the model with a head, like transformers' classes.

    Positions may have the shape ``[3, 1, tokens]`` if the text model accepts this shape.
    """
    pretrained: Any = next(base for base in model_class.__mro__[1:] if issubclass(base, PreTrainedModel))
    make: Any = model_class

    def init(self: Any, config: Any) -> None:
        pretrained.__init__(self, config)
        self.model = make(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self: Any, *, logits_to_keep: int | torch.Tensor = 0, **inputs: Any) -> CausalLMOutputWithPast:
        output = self.model(**inputs)
        rows = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = _scaled(self.lm_head(output.last_hidden_state[:, rows]), self.config)
        return CausalLMOutputWithPast(
            logits=logits, past_key_values=output.past_key_values, hidden_states=output.hidden_states
        )

    members = {
        "__init__": init,
        "__module__": __name__,
        "base_model_prefix": "model",
        "forward": forward,
        "config_class": model_class.config_class,
        # transformers would read these attributes from the source code of the class's module, so set them here.
        "_can_set_attn_implementation_cached_value": make._can_set_attn_implementation(),
        "_can_set_experts_implementation_cached_value": make._can_set_experts_implementation(),
        "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
        "_tp_plan": {"lm_head": "colwise_gather_output"},
    }
    prefix = model_class.__name__.removesuffix("Model").removesuffix("Text")
    return type(f"{prefix}ForCausalLM", (pretrained, GenerationMixin), members)


def _scaled(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """Return logits after the scale and the soft cap of a configuration. The fields have the names that models of
    transformers use.
    """
    scale = getattr(config, "output_multiplier", 1.0) / getattr(config, "logits_scaling", 1.0)
    logits = logits if scale == 1.0 else logits * scale
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else (logits / cap).tanh() * cap


def known_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return transformers' causal language model for a text model's configuration, or None if there is none."""
    mapping: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        return None
    entry = mapping[type(config)]
    found: type[PreTrainedModel] = entry[0] if isinstance(entry, tuple) else entry
    return found


# Comparison of the results of a separate text model with those of the composite that contains this text model.

_PROBE_TOKENS = 8
_TOLERANCE = 0.01
"""Limit of the relative difference of two vectors. If the same modules compute the same input twice, rounding causes a
smaller difference.
"""


@torch.inference_mode()
def probe_text(whole: PreTrainedModel) -> Probed:
    """Return a composite's attention calls and logits for tokens without media. Raises ModelLoadError if the forward
    pass fails.
    """
    return probe(whole, _probe_tokens(whole))


@torch.inference_mode()
def check_same_text(module: PreTrainedModel, expected: Probed, name: str) -> None:
    """Raise ModelLoadError unless a text model alone gives the ``expected`` results of the composite with class ``name``.

    A composite may scale embeddings, count positions in another way than its text model, or let tokens attend to later
    tokens. The text model alone would then give wrong output without a warning. A constant factor between the logits is
    accepted if transformers has a class for the text model. For example, Cohere2 scales logits, but transformers'
    Cohere2-Vision leaves the scale out.
    """
    tokens = _probe_tokens(module)
    found = probe(module, tokens, torch.arange(len(tokens), device=tokens.device))
    if reason := _difference(expected, found, scaled=known_class(module.config) is not None):
        raise ModelLoadError(f"{name} is not supported: its text model cannot be served alone, because {reason}")


def _probe_tokens(model: PreTrainedModel) -> torch.Tensor:
    embedding: Any = model.get_input_embeddings()
    return torch.arange(_PROBE_TOKENS, device=embedding.weight.device) + 1


def _difference(expected: Probed, found: Probed, *, scaled: bool) -> str | None:
    """Return how the results of a text model differ from the results of its composite, or None if they are equal. If
    ``scaled``, logits that differ only by a constant factor count as equal.
    """
    if [call.module for call in expected.calls] != [call.module for call in found.calls]:
        return (
            f"it calls attention {len(found.calls)} times, but {len(expected.calls)} times as a part of the whole model"
        )
    for index, (call, alone) in enumerate(zip(expected.calls, found.calls, strict=True)):
        if not _is_causal(call.mask):
            return "tokens attend to later tokens in the whole model"
        for part in ("query", "key", "value"):
            if most_differ(getattr(call, part), getattr(alone, part), _TOLERANCE):
                return f"the {part} of attention call {index} differs from that in the whole model"
    one, other = (each.output.logits[0].float() for each in (expected, found))
    if scaled:
        one, other = (torch.nn.functional.normalize(each, dim=-1) for each in (one, other))
    return "its logits differ from those of the whole model" if most_differ(one, other, _TOLERANCE) else None


def _is_causal(mask: object) -> bool:
    """Return whether a mask ``[1, heads, tokens, tokens]`` lets no token attend to a later token. True if there is no
    mask.
    """
    if not isinstance(mask, torch.Tensor):
        return mask is None
    seen = mask if mask.dtype == torch.bool else mask == 0
    return not bool(seen.triu(1).any())
