"""The cell of ``penstock status`` on an engine's speculation."""

from typing import Any

from rich.text import Text


def drafts_of(info: dict[str, Any]) -> Text:
    """Mean tokens of a step with drafts, of a request, and the share of the drafted tokens that held; empty for an engine that
    does not speculate, or does not say. ``info``: what an engine says of itself.
    """
    speculation = info.get("speculative")
    if not speculation:
        return Text("")
    if speculation["failure"]:
        return Text(f"{speculation['method']} off", style="red")
    if not speculation["num_drafts"]:
        return Text(f"{speculation['method']} -")
    accepted, drafted = speculation["num_accepted_tokens"], speculation["num_draft_tokens"]
    length = 1 + accepted / speculation["num_drafts"]
    return Text(f"{speculation['method']} {length:.2f} ({accepted / drafted:.0%})")
