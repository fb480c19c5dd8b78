"""Whether templates read texts or parts, as seen from the templates of models."""

import jinja2
import pytest

from penstock_frontend.processing.chat.templates import content_format

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
