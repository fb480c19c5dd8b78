"""Prompts of models that were trained to fill in what is missing between two texts."""

from typing import NamedTuple

from penstock_common.errors import Unimplemented
from penstock_frontend.processing.prompts.tokenizer import Tokenizer


class InfillForm(NamedTuple):
    """The tokens that a model's prompt is put together with: what stands before the gap, what stands behind it, and what asks for
    the middle.
    """

    before: str
    behind: str
    middle: str


FORMS = (
    InfillForm("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    InfillForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, StableCode
    InfillForm("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillForm("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
)


def infill_form(tokenizer: Tokenizer) -> InfillForm | None:
    """The form whose tokens the tokenizer has; None where it has no such tokens."""
    return next((form for form in FORMS if all(tokenizer.token_id(token) is not None for token in form)), None)


def infill_prompt(tokenizer: Tokenizer, prompt: str, suffix: str) -> str:
    """The prompt for what stands between ``prompt`` and ``suffix``. Raises Unimplemented for models without tokens for it."""
    form = infill_form(tokenizer)
    if form is None:
        raise Unimplemented("suffix is not served: the model has no tokens for what is to be filled in", field="suffix")
    return f"{form.before}{prompt}{form.behind}{suffix}{form.middle}"
