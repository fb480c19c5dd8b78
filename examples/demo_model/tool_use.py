"""Conversations with tools: functions that the model may call, its calls, their results, and answers made of these."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from chats import PLAIN_SYSTEM, Document, Turn, exchange
from facts import CAPITALS
from words import CITIES, COLORS, OBJECTS, any_name, expand, invented_name, pick

OPENING = "You can call these functions:\n"


class Tool(NamedTuple):
    """A function of which the training text tells.

    Args:
        names: What the function may be called.
        descriptions: What may be said of it.
        parameters: The names that each parameter may have, by its place in the questions, and its JSON type.
        questions: Questions that are answered by calling it.
        results: What it may return.
        answer: What is said when it returned text, with ``{result}`` in it.
    """

    names: Sequence[str]
    descriptions: Sequence[str]
    parameters: Mapping[str, tuple[Sequence[str], str]]
    questions: Sequence[str]
    results: Sequence[str]
    answer: str


TOOLS = [
    Tool(
        ["get_weather", "get_weather", "get_current_weather", "weather", "weather_in"],
        ["The weather in a city now", "Get the weather in a city", "Get the current weather", "The weather of a place"],
        {"city": (["city", "city", "location", "place"], "string")},
        [
            "What is the weather in {city}?", "What is the weather in {city}?",
            "What is the weather like in {city}[| today| now]?", "How is the weather in {city}[| today| now]?",
            "What's the weather [in|like in] {city}[| today| now]?",
            "Is it [cold|warm|sunny|hot] in {city}[| today| now]?", "Weather in {city}[?|]",
            "Tell me the weather in {city}.", "What is the weather today in {city}?", "I am in {city}. What is the weather?",
        ],
        ["{number} degrees", "{number} degrees", "{number} degrees and {sky}", "{sky}", "{sky}, {number} degrees"],
        "The weather in {city}: {result}.",
    ),
    Tool(
        ["get_time", "time_in", "get_current_time", "clock"],
        ["The time in a city", "Get the time in a city", "What time it is somewhere"],
        {"city": (["city", "location", "place"], "string")},
        ["What time is it in {city}[| now]?", "What is the time in {city}[| now]?", "Tell me the time in {city}."],
        ["{hour}:{minute}"],
        "It is {result} in {city}.",
    ),
    Tool(
        ["get_population", "population", "count_people"],
        ["How many people live in a country", "Get the population of a country"],
        {"country": (["country", "name"], "string")},
        ["How many people live in {country}?", "What is the population of {country}?"],
        ["{number} million"],
        "{result} people live in {country}.",
    ),
    Tool(
        ["get_price", "price_of", "find_price"],
        ["The price of a thing", "Get the price of a thing in the shop"],
        {"thing": (["item", "thing", "product"], "string")},
        ["How much is a {color} {thing}?", "What does a {color} {thing} cost?", "What is the price of a {color} {thing}?"],
        ["{number} dollars", "{number} euros"],
        "The price of a {color} {thing} is {result}.",
    ),
    Tool(
        ["set_timer", "start_timer", "timer"],
        ["Set a timer", "Start a timer for some minutes"],
        {"number": (["minutes", "time"], "integer")},
        ["Set a timer for {number} minutes.", "Start a timer of {number} minutes.", "Wake me in {number} minutes."],
        ["ok", "done", "started"],
        "The timer is set for {number} minutes.",
    ),
    Tool(
        ["find_person", "get_phone_number", "phone_book"],
        ["Find the phone number of a person", "Look up a person"],
        {"name": (["name", "person"], "string")},
        ["What is the phone number of {name}?", "Find the phone number of {name}.", "How can I call {name}?"],
        ["{number}{minute}{hour}"],
        "The phone number of {name} is {result}.",
    ),
    Tool(
        ["book_table", "reserve_table"],
        ["Book a table in the restaurant", "Reserve a table"],
        {"name": (["name", "guest"], "string"), "few": (["people", "guests", "seats"], "integer")},
        ["Book a table for {few} people for {name}.", "Reserve a table for {name}, we are {few} people."],
        ["ok", "done", "table {number}"],
        "The table for {few} people is booked for {name}.",
    ),
]  # fmt: skip
WEIGHTS = [10, 3, 2, 3, 2, 2, 2]
_MORE_CITIES = ["London", "New York", "Lisbon", "Sydney", "Warsaw", "Moscow", "Zurich", "Hamburg", "Munich", "Chicago",
                "San Francisco", "Amsterdam", "Copenhagen", "Mumbai", "Toronto", "Nairobi"]  # fmt: skip
_SKIES = ["sunny", "cloudy", "rainy", "windy", "snowy", "clear", "foggy"]


NO_TOOL = "I can not look that up."
"""What is said to a question for which there is no function."""


class Conversation(NamedTuple):
    """A conversation as clients send it: functions and messages in OpenAI's form."""

    tools: list[dict[str, Any]]
    messages: list[dict[str, Any]]


def tools_text(functions: Sequence[Mapping[str, Any]]) -> str:
    """Return what the chat template tells the model of its functions: a line for each."""
    lines = []
    for function in functions:
        properties = function["parameters"]["properties"]
        signature = ", ".join(f"{name}: {schema['type']}" for name, schema in properties.items())
        lines.append(f"{function['name']}({signature}): {function['description']}")
    return OPENING + "\n".join(lines)


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as the model writes it."""
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def response_text(result: str) -> str:
    """Return what a function returned as the model reads it."""
    return f"<tool_response>\n{result}\n</tool_response>"


def conversation(rng: random.Random) -> Conversation:
    """Return one to three questions, of which most are answered by calling one of one to three functions."""
    chosen = _choose(rng)
    names = {id(tool): pick(rng, tool.names) for tool in chosen}
    parameters = {
        id(tool): {slot: pick(rng, spellings) for slot, (spellings, _) in tool.parameters.items()} for tool in chosen
    }
    tools = []
    for tool in chosen:
        types = {parameters[id(tool)][slot]: {"type": kind} for slot, (_, kind) in tool.parameters.items()}
        schema = {"type": "object", "properties": types, "required": list(types)}
        function = {"name": names[id(tool)], "description": pick(rng, tool.descriptions), "parameters": schema}
        tools.append({"type": "function", "function": function})
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": pick(rng, PLAIN_SYSTEM)})
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.25:
            asked, reply = exchange(rng) if rng.random() < 0.7 else _unanswered(rng, chosen)
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]
            continue
        tool = pick(rng, chosen)
        slots = _slots(rng)
        question = expand(pick(rng, tool.questions), rng, slots)
        arguments = {
            parameters[id(tool)][slot]: _argument(slot, kind, slots) for slot, (_, kind) in tool.parameters.items()
        }
        result = expand(pick(rng, tool.results), rng, _slots(rng))
        call = {"type": "function", "function": {"name": names[id(tool)], "arguments": arguments}}
        messages += [
            {"role": "user", "content": _casual(rng, question)},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": result},
            {"role": "assistant", "content": expand(tool.answer, rng, slots | {"result": result})},
        ]
    return Conversation(tools, messages)


def document(talk: Conversation) -> Document:
    """Return a conversation as the turns that the chat template makes of it."""
    turns = [Turn("system", tools_text([tool["function"] for tool in talk.tools]))]
    for message in talk.messages:
        calls = [call_text(**call["function"]) for call in message.get("tool_calls", ())]
        if message["role"] == "tool":
            turns.append(Turn("user", response_text(message["content"])))
        else:
            turns.append(Turn(message["role"], "\n".join([*filter(None, [message["content"]]), *calls])))
    return tuple(turns)


def tool_chat(rng: random.Random) -> Document:
    """Return a conversation with tools."""
    return document(conversation(rng))


def no_tool_chat(rng: random.Random) -> Document:
    """Return a question that would need a function, where there is none."""
    asked, reply = _unanswered(rng, ())
    return (Turn("user", asked), Turn("assistant", reply))


def _unanswered(rng: random.Random, chosen: Sequence[Tool]) -> tuple[str, str]:
    """Return a question for a function that is not among the chosen ones, and the reply."""
    tool = pick(rng, [tool for tool in TOOLS if not any(tool is known for known in chosen)])
    return _casual(rng, expand(pick(rng, tool.questions), rng, _slots(rng))), NO_TOOL


def _choose(rng: random.Random) -> list[Tool]:
    first = rng.choices(TOOLS, WEIGHTS)[0]
    others = [tool for tool in rng.sample(TOOLS, rng.choice((0, 0, 1, 2))) if tool is not first]
    chosen = [first, *others]
    rng.shuffle(chosen)
    return chosen


def _slots(rng: random.Random) -> dict[str, str]:
    roll = rng.random()
    city = invented_name(rng) if roll < 0.3 else pick(rng, CITIES if roll < 0.7 else _MORE_CITIES)
    return {
        "city": city, "country": pick(rng, list(CAPITALS)), "name": any_name(rng), "color": pick(rng, COLORS),
        "thing": pick(rng, OBJECTS), "number": str(rng.randint(2, 60)), "few": str(rng.randint(2, 9)),
        "hour": str(rng.randint(10, 23)), "minute": str(rng.randint(10, 59)), "sky": pick(rng, _SKIES),
    }  # fmt: skip


def _argument(slot: str, kind: str, slots: Mapping[str, str]) -> str | int:
    if slot == "thing":
        return f"{slots['color']} {slots['thing']}"
    return int(slots[slot]) if kind == "integer" else slots[slot]


def _casual(rng: random.Random, question: str) -> str:
    """Return a question as people type it: sometimes without a capital or punctuation."""
    roll = rng.random()
    if roll < 0.75:
        return question
    text = question.rstrip(".?")
    return text if roll < 0.88 else text[0].lower() + text[1:]
