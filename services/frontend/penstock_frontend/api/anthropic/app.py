"""The routes of Anthropic's API."""

from collections.abc import Sequence

from starlette.routing import Route

from penstock_frontend.api.anthropic import errors
from penstock_frontend.api.anthropic.messages import Messages
from penstock_frontend.api.openai.bodies import Bodies
from penstock_frontend.api.openai.endpoint import Endpoint, Gate
from penstock_frontend.calls.chat import ChatCalls
from penstock_frontend.calls.generate import AsyncLLM


def routes(llm: AsyncLLM, chat: ChatCalls, *, gate: Gate, bodies: Bodies) -> Sequence[Route]:
    """All of them. ``gate`` and ``bodies`` are those of the other protocols of the listener."""
    messages = Messages(llm, chat)
    handlers = {errors.PREFIX: messages.create, f"{errors.PREFIX}/count_tokens": messages.count}
    return [
        Route(path, Endpoint(gate, bodies, handler, errors.answer), methods=["POST"])
        for path, handler in handlers.items()
    ]
