"""Reasoning between ``<think>`` and ``</think>``, as Qwen3, QwQ, GLM 4.5, Kimi K2 and DeepSeek V3.1 write it."""

from typing import ClassVar

from penstock_frontend.processing.parsers.reasoning_tags import TagReasoningParser


class Qwen3ReasoningParser(TagReasoningParser):
    """Reasoning at the begin of the answer, between tags."""

    tags: ClassVar = ("<think>", "</think>")

    @classmethod
    def fits(cls, template: str) -> bool:
        """Whether the template knows the tag that ends the reasoning."""
        return cls.tags[1] in template
