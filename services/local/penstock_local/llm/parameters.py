"""Parameters that callers of an ``LLM`` write: those of requests, which refuse foreign names with what to use."""

import copy
from typing import Any, Self

from penstock_common.types import sampling
from penstock_local.llm import vllm_names
from penstock_local.llm.vllm_names import NamesReplacements


class SamplingParams(  # type: ignore[misc]  # dataclasses cannot thaw fields, structs can  # noqa: D101
    sampling.SamplingParams, frozen=False, kw_only=True, omit_defaults=True, metaclass=NamesReplacements
):
    __doc__ = sampling.SamplingParams.__doc__
    replacements = vllm_names.SAMPLING

    def clone(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        for name in changes:
            if refusal := type(self).refusal(name):
                raise TypeError(refusal)
        cloned = copy.deepcopy(self)
        for name, value in changes.items():
            setattr(cloned, name, value)
        return cloned


class StructuredOutput(  # noqa: D101
    sampling.StructuredOutput, frozen=True, kw_only=True, metaclass=NamesReplacements
):
    __doc__ = sampling.StructuredOutput.__doc__
    replacements = vllm_names.STRUCTURED_OUTPUT
