"""Calls the API through LlamaIndex and prints the results as one JSON object: ``python llama_index_client.py URL``."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


def main(url: str) -> None:
    """Print the result of each call."""
    options = {"api_base": url, "api_key": "none", "model": "model", "temperature": 0.0, "max_tokens": 200}
    llm = OpenAILike(**options, context_window=2048, is_chat_model=True, is_function_calling_model=True)
    plain = OpenAILike(**options, context_window=2048)
    extra = OpenAILike(
        **options,
        context_window=2048,
        is_chat_model=True,
        additional_kwargs={"extra_body": {"top_k": -1, "min_p": 0.0}},
    )
    called = llm.chat_with_tools([FunctionTool.from_defaults(fn=weather)], user_msg="the weather?")
    (call,) = llm.get_tool_calls_from_response(called)
    history = [
        ChatMessage(role="user", content="hello"),
        called.message,
        ChatMessage(role="tool", content=weather(**call.tool_kwargs), additional_kwargs={"tool_call_id": call.tool_id}),
    ]
    print(
        json.dumps(
            {
                "answer": llm.complete("hello").text,
                "streamed": "".join(
                    piece.delta for piece in llm.stream_chat([ChatMessage(role="user", content="hello")])
                ),
                "call": [call.tool_name, call.tool_kwargs],
                "after": llm.chat(history).message.content,
                "completion": plain.complete("hello").text,
                "extra": extra.complete("hello").text,
            }
        )
    )


main(sys.argv[1])
