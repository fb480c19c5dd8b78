"""A model's chat templates: found, run as transformers runs them, and never for long."""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest

from penstock_common.errors import ConfigError, InvalidArgument
from penstock_frontend.config import ModelConfig
from penstock_frontend.processing.chat import templates as chat_template
from penstock_frontend.processing.chat.templates import ChatTemplates, content_format, load_chat_templates
from tests.fakes.models.chat_templates import save_chat_model


def render(source: str, *, max_chars: int = 10_000, **variables: Any) -> str:
    templates = ChatTemplates({"default": source}, {"bos_token": "<s>"})
    return templates.render({"messages": [{"role": "user", "content": "hi"}], **variables}, max_chars=max_chars)


def loaded(folder: Path, **variables: Any) -> str:
    return load_chat_templates(ModelConfig(path=str(folder))).render(variables, max_chars=100)


def test_the_template_of_tokenizer_config_is_used_with_its_special_tokens(tmp_path: Path) -> None:
    save_chat_model(tmp_path, "{{ bos_token }}{{ messages }}{{ eos_token }}")
    assert loaded(tmp_path, messages=1) == "<s>1</s>"


def test_a_file_of_its_own_wins(tmp_path: Path) -> None:
    save_chat_model(tmp_path, "config")
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert loaded(tmp_path) == "file <s>"


def test_of_named_templates_tools_have_their_own(tmp_path: Path) -> None:
    save_chat_model(tmp_path, [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])
    assert loaded(tmp_path) == "plain"
    assert loaded(tmp_path, tools=[1]) == "tools"


def test_templates_in_additional_files_are_named_by_their_file(tmp_path: Path) -> None:
    save_chat_model(tmp_path, "plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert loaded(tmp_path, tools=[1]) == "more"


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    save_chat_model(tmp_path, None)
    with pytest.raises(InvalidArgument, match="the model has no chat template"):
        loaded(tmp_path)


def test_a_template_that_cannot_be_read_refuses_conversations_alone(tmp_path: Path) -> None:
    save_chat_model(tmp_path, "{% if %}")
    with pytest.raises(InvalidArgument, match="cannot be read: line 1: Expected an expression"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("sources", "hides"),
    [
        ({"default": "{{ messages[0].content }}"}, True),
        ({"default": "{# tools #}{{ 'tools' }}{{ messages[0].tools }}"}, True),
        ({"default": "{% for tool in tools %}{{ tool }}{% endfor %}"}, False),
        ({"default": "{% if tools is not defined %}{% set tools = none %}{% endif %}{{ tools }}"}, False),
        ({"default": "{% macro all() %}{% generation %}{{ tools | tojson }}{% endgeneration %}{% endmacro %}"}, False),
        ({"default": "{{ tools }}", "tool_use": "plain"}, True),
        ({"default": "plain", "tool_use": "{{ tools }}"}, False),
        ({"default": "{% if %}"}, False),
        ({}, False),
    ],
)
def test_a_template_that_does_not_read_tools_hides_them(sources: dict[str, str], hides: bool) -> None:
    assert ChatTemplates(sources, {}).hides_tools is hides


def test_a_template_of_a_wrong_type_is_a_config_error(tmp_path: Path) -> None:
    save_chat_model(tmp_path, [{"nome": "default"}])
    with pytest.raises(ConfigError, match="tokenizer_config.json: chat_template is neither"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ {'b': '<ü>', 'a': 1} | tojson }}", '{"b": "<ü>", "a": 1}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", json.dumps({"a": 2, "b": 1}, indent=1)),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a{% generation %}{% set x = 1 %}b{{ x }}{% endgeneration %}{{ x }}", "ab11"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{% set ns = namespace(n=1) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "4"),
        ("{{ dict(a=1) }}{{ dict.fromkeys('b') }}", "{'a': 1}{'b': None}"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(messages[0].content) }}{{ bos_token }}", "[hi]<s>"),
        ("{{ '-' * 3 }}{{ 2 ** 3 }}{{ 2.5 * 2 }}", "---85.0"),
    ],
)
def test_templates_find_what_transformers_offers_them(source: str, text: str) -> None:
    assert render(source) == text


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages[0].content.nothing.more }}", "has no attribute"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ dict.update(messages[0], {'role': 'x'}) }}", "no attribute 'update'"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "not a valid variable name"),
        ("{{ 'x' * 10000000 }}", "too much memory"),
        ("{{ 9 ** 99999999 }}", "too much memory"),
    ],
)
def test_what_a_template_raises_is_about_the_messages(source: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=f"the model's chat template refuses the messages: .*({why})") as error:
        render(source)
    assert error.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% for i in range(99999) %}{{ m(n) }}{% endfor %}{% endmacro %}{{ m(1) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    ],
)
def test_a_template_does_not_run_for_ever(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "TIME_LIMIT", 0.01)
    with pytest.raises(InvalidArgument, match="takes longer than its time limit|more than|recursion"):
        render(source)


def test_a_prompt_has_a_limit() -> None:
    assert render("{{ 'x' * 10 }}", max_chars=10) == "x" * 10
    with pytest.raises(InvalidArgument, match="the rendered prompt has more than 10 characters"):
        render("{{ 'x' * 11 }}", max_chars=10)


# Detection whether a template reads contents as text or as parts, with templates of real models.

QWEN2_VL = (
    "{% set image_count = namespace(value=0) %}{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system{% endif %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}<|im_end|>\n{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "<|image_pad|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
LLAVA = (
    "{% for message in messages %}{{ message['role'] | upper }} {% for content in message['content'] | "
    "selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}{% for content in message['content'] | "
    "selectattr('type', 'equalto', 'text') %}{{ content['text'] }}{% endfor %}{% endfor %}"
)
GEMMA3 = (
    "{%- if messages[0]['role'] == 'system' -%}{%- if messages[0]['content'] is string -%}{%- set first = "
    "messages[0]['content'] -%}{%- else -%}{%- set first = messages[0]['content'][0]['text'] -%}{%- endif -%}"
    "{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set loop_messages = messages -%}{%- endif -%}"
    "{%- for message in loop_messages -%}{%- if message['content'] is string -%}{{ message['content'] | trim }}"
    "{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}{{ item['type'] }}{%- endfor -%}"
    "{%- endif -%}{%- endfor -%}"
)
QWEN3_VL = (
    "{%- macro render_content(content, do_vision_count) %}{%- if content is string %}{{- content }}{%- else %}"
    "{%- for item in content %}{{ item.type }}{%- endfor %}{%- endif %}{%- endmacro %}"
    "{%- for message in messages %}{%- set content = render_content(message.content, True) %}{{ content }}{%- endfor %}"
)
SMOLVLM = (
    "{% for message in messages %}{{ message['role'] | capitalize }}{% if message['content'][0]['type'] == 'image' %}"
    "{{ ':' }}{% endif %}{% for line in message['content'] %}{{ line['type'] }}{% endfor %}{% endfor %}"
)
ASSIGNED = (
    "{% for m in messages %}{% set body = m.get('content') if m.content else [] %}{% for part in body %}{{ part }}{% endfor %}"
    "{% endfor %}"
)
CHATML = "{% for message in messages %}{{ message.role }}\n{{ message.content }}{% endfor %}"
TOOLS = (
    "{% for tool in tools %}{{ tool.content }}{% for x in tool.content %}{{ x }}{% endfor %}{% endfor %}"
    "{% for message in messages %}{% for call in message.tool_calls %}{{ call }}{% endfor %}{{ message.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "reads_parts", "tells_text"),
    [
        pytest.param(QWEN2_VL, True, True, id="qwen2_vl"),
        pytest.param(LLAVA, True, False, id="llava"),
        pytest.param(GEMMA3, True, True, id="gemma3"),
        pytest.param(QWEN3_VL, True, True, id="qwen3_vl"),
        pytest.param(SMOLVLM, True, False, id="smolvlm"),
        pytest.param(ASSIGNED, True, False, id="assigned"),
        pytest.param(CHATML, False, False, id="chatml"),
        pytest.param(TOOLS, False, False, id="loops over other things"),
    ],
)
def test_how_a_template_reads_contents(template: str, reads_parts: bool, tells_text: bool) -> None:
    assert content_format(jinja2.Environment().parse(template)) == (reads_parts, tells_text)
