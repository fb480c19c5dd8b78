"""Calls the API through LangChain and prints the results as one JSON object: ``python langchain_client.py URL``."""

import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def main(url: str) -> None:
    """Print the result of each call."""
    chat = ChatOpenAI(base_url=url, api_key="none", model="model", temperature=0, max_tokens=200)
    answer = chat.invoke("hello")
    called = chat.bind_tools([weather]).invoke("the weather?")
    result = weather.invoke(called.tool_calls[0])
    person = chat.with_structured_output(Person).invoke("json, please")
    print(
        json.dumps(
            {
                "answer": answer.content,
                "tokens": answer.usage_metadata["output_tokens"],
                "streamed": "".join(str(piece.content) for piece in chat.stream("hello")),
                "batch": [each.content for each in chat.batch(["hello", "hello"])],
                "call": [called.tool_calls[0]["name"], called.tool_calls[0]["args"]],
                "after": chat.bind_tools([weather]).invoke([("user", "hello"), called, result]).content,
                "structured": person.model_dump(),
                "extra": chat.bind(extra_body={"top_k": -1, "min_p": 0.0}).invoke("hello").content,
            }
        )
    )


main(sys.argv[1])
