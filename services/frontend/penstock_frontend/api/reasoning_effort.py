"""How much a model is to reason, as variables of its chat template."""

from typing import Any

from penstock_common.errors import InvalidArgument, quoted

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of OpenAI's and Anthropic's protocols."""


def effort_kwargs(effort: str | None, field: str) -> dict[str, Any]:
    """Return the variables for an effort: ``none`` turns reasoning off, where the template knows that. Raises InvalidArgument."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise InvalidArgument(
            f"{field} is {quoted(effort)}; known: {', '.join(EFFORTS)}. Other values go into "
            "chat_template_kwargs.reasoning_effort",
            field=field,
        )
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
