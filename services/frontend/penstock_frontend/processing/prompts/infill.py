"""Fill-in-the-middle prompts, for models that were trained to fill the gap between two texts."""

from typing import NamedTuple

from penstock_common.errors import Unimplemented
from penstock_frontend.processing.prompts.tokenizer import Tokenizer


class InfillForm(NamedTuple):
    """Special tokens of a fill-in-the-middle prompt: the tokens before the prefix, before the suffix and before the
    middle.
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
    """Return the special tokens for fill-in-the-middle prompts that the tokenizer has. Return None if it has no such
    tokens.
    """
    return next((form for form in FORMS if all(tokenizer.token_id(token) is not None for token in form)), None)


def infill_prompt(tokenizer: Tokenizer, prompt: str, suffix: str) -> str:
    """Return the prompt that asks the model to fill the gap between ``prompt`` and ``suffix``.

    Raises Unimplemented if the model has no fill-in-the-middle tokens.
    """
    form = infill_form(tokenizer)
    if form is None:
        raise Unimplemented(
            "suffix is set, but the model has no fill-in-the-middle tokens; leave suffix out", field="suffix"
        )
    return f"{form.before}{prompt}{form.behind}{suffix}{form.middle}"
