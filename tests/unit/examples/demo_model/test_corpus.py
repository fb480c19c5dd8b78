"""The text generator of the demo model: repeatable, well formed, and right in its sums and records."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock_frontend.processing.chat.templates import ChatTemplates
from tests.fakes.example_modules import example_modules

FOLDER = Path(__file__).resolve().parents[4] / "examples" / "demo_model"
MODULES = ["words", "stories", "facts", "scenes", "tasks", "chats", "corpus"]
SUM = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")


@pytest.fixture(scope="module")
def demo() -> Iterator[SimpleNamespace]:
    with example_modules(FOLDER, MODULES) as modules:
        yield modules


def rendered(demo: SimpleNamespace, seed: int, count: int) -> list[str]:
    """Return the text of a seed's first documents."""
    return [demo.corpus.render(document) for document in itertools.islice(demo.corpus.documents(seed), count)]


def check_sum(match: re.Match[str]) -> bool:
    left, sign, right, result = int(match[1]), match[2], int(match[3]), int(match[4])
    return result == {"+": left + right, "-": left - right, "*": left * right}[sign]


def test_same_seed_same_text_and_other_seed_other_text(demo: SimpleNamespace) -> None:
    assert rendered(demo, 3, 200) == rendered(demo, 3, 200)
    assert rendered(demo, 3, 200) != rendered(demo, 4, 200)


def test_documents_vary(demo: SimpleNamespace) -> None:
    stories = {demo.stories.make_story(random.Random(seed)).text for seed in range(300)}
    assert len(stories) == 300


def test_all_sums_are_right(demo: SimpleNamespace) -> None:
    matches = [match for text in rendered(demo, 5, 2000) for match in SUM.finditer(text)]
    assert len(matches) > 1000
    assert all(check_sum(match) for match in matches)


def test_arithmetic_answers_repeat_the_question(demo: SimpleNamespace) -> None:
    rng = random.Random(1)
    for _ in range(300):
        question, answer = demo.tasks.arithmetic(rng)
        match = SUM.fullmatch(answer)
        assert match is not None
        assert check_sum(match)
        assert re.findall(r"\d+", question) == [match[1], match[3]]


def test_word_problems_end_with_the_result(demo: SimpleNamespace) -> None:
    rng = random.Random(2)
    for _ in range(300):
        question, answer = demo.tasks.word_problem(rng)
        match = SUM.match(answer)
        assert match is not None
        assert check_sum(match)
        assert re.findall(r"\d+", question) == [match[1], match[3]]
        assert f" has {match[4]} " in answer


def test_json_records_parse_and_hold_what_was_described(demo: SimpleNamespace) -> None:
    rng = random.Random(3)
    for _ in range(300):
        question, answer = demo.tasks.json_record(rng)
        for key, value in json.loads(answer).items():
            for part in value if isinstance(value, list) else [value]:
                assert key == "in_stock" or str(part).lower() in question.lower()


@pytest.mark.parametrize("task", ["invented_record", "json_list"])
def test_open_json_answers_parse(demo: SimpleNamespace, task: str) -> None:
    rng = random.Random(4)
    assert all(json.loads(getattr(demo.tasks, task)(rng)[1]) for _ in range(200))


def test_counting_goes_from_start_to_stop(demo: SimpleNamespace) -> None:
    rng = random.Random(5)
    for _ in range(200):
        question, answer = demo.tasks.count(rng)
        numbers = [int(number) for number in answer.split(", ")]
        limits = [int(number) for number in re.findall(r"\d+", question)]
        assert numbers[-1] == limits[-1]
        assert numbers[0] == (limits[0] if len(limits) == 2 else 1)
        assert {abs(right - left) for left, right in itertools.pairwise(numbers)} == {1}


def test_templates_leave_nothing_unfilled(demo: SimpleNamespace) -> None:
    for text in rendered(demo, 6, 2000):
        assert not re.search(r"\{\w+\}|\|(?!>)(?<!<\|)", re.sub(r"<\|\w+\|>", "", text))


def test_story_questions_are_answered_by_the_story(demo: SimpleNamespace) -> None:
    rng = random.Random(7)
    for _ in range(200):
        story = demo.stories.make_story(rng)
        _, answer = demo.stories.story_question(rng, story)
        assert story.name in answer or story.friend in answer
        assert story.name in story.text
        assert story.kind in story.text


def test_only_answers_and_stories_are_learned(demo: SimpleNamespace) -> None:
    document = demo.chats.turns(("What is 1 + 1?", "1 + 1 = 2"))
    assert [tuple(span) for span in demo.corpus.spans(document)] == [
        ("<s>", False),
        ("<|user|>", False),
        ("What is 1 + 1?<|end|>", False),
        ("<|assistant|>", False),
        ("1 + 1 = 2<|end|>", True),
    ]
    assert demo.corpus.render(demo.corpus.plain("Hello.")) == "<s>Hello.</s>"


def test_chat_template_renders_what_training_saw(demo: SimpleNamespace) -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Environment(autoescape=False).from_string(demo.corpus.CHAT_TEMPLATE)
    for document in itertools.islice(demo.corpus.documents(8), 300):
        if document[0].role == "text":
            continue
        messages = [{"role": turn.role, "content": turn.text} for turn in document]
        assert template.render(messages=messages, bos_token="<s>") == demo.corpus.render(document)
    parts = [{"role": "user", "content": [{"type": "text", "text": " Hi "}]}]
    assert (
        template.render(messages=parts, bos_token="<s>", add_generation_prompt=True)
        == "<s><|user|>Hi<|end|><|assistant|>"
    )


def test_chat_template_renders_tools_calls_and_results(demo: SimpleNamespace) -> None:
    templates = ChatTemplates({"default": demo.corpus.CHAT_TEMPLATE}, {"bos_token": "<s>"})
    assert not templates.hides_tools
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "look", "description": "Looks", "parameters": schema}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    assert templates.render({"tools": [tool], "messages": messages}, max_chars=1000) == (
        "<s><|system|>You can call these functions:\nlook(city: string): Looks<|end|><|user|>Hi<|end|>"
        '<|assistant|><tool_call>\n{"name": "look", "arguments": {"city": "Oslo"}}\n</tool_call><|end|>'
        "<|user|><tool_response>\nsunny\n</tool_response><|end|>"
    )


def test_chat_template_takes_tools_of_any_schema(demo: SimpleNamespace) -> None:
    templates = ChatTemplates({"default": demo.corpus.CHAT_TEMPLATE}, {"bos_token": "<s>"})
    tools = [{"type": "function", "function": {"name": "a", "description": "", "parameters": schema}} for schema in (
        {}, {"type": "object"}, {"properties": {"x": {}, "y": {"type": ["string", "null"]}, "z": True}},
    )]  # fmt: skip
    prompt = templates.render({"tools": tools, "messages": [{"role": "user", "content": "Hi"}]}, max_chars=1000)
    assert "a()\na()\na(x, y: ['string', 'null'], z)<|end|>" in prompt


def test_chat_template_refuses_an_unknown_role(demo: SimpleNamespace) -> None:
    jinja2 = pytest.importorskip("jinja2")

    def refuse(message: str) -> None:
        raise ValueError(message)

    template = jinja2.Environment(autoescape=False).from_string(demo.corpus.CHAT_TEMPLATE)
    with pytest.raises(ValueError, match="Unknown role: robot"):
        template.render(messages=[{"role": "robot", "content": "x"}], bos_token="<s>", raise_exception=refuse)
