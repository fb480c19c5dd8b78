"""Requests as the Python client builds them, and its errors for wrong arguments."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.common.v1 import sampling_pb2
from penstock.common.v1.stats_pb2 import Usage as UsageMessage
from penstock_client import (
    ChatMessage,
    Client,
    Media,
    SamplingParams,
    StructuredOutput,
    Tool,
    audio,
    image,
    message,
    video,
)
from penstock_client.requests import chat_request, generate_request, pooling_input
from penstock_client.results import read_usage
from penstock_common.types.sampling import SamplingParams as LocalSamplingParams

PNG = b"\x89PNG"


def test_media_are_bytes_files_and_urls(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    assert image(PNG) == image(file) == Media(modality="image", data=PNG)
    assert image("https://a/b") == Media(modality="image", url="https://a/b")
    assert audio(b"RIFF", processor_kwargs="{}") == Media(modality="audio", data=b"RIFF", processor_kwargs="{}")


def test_a_video_has_pictures_and_their_times() -> None:
    assert [frame.timestamp for frame in video([PNG, PNG, PNG], fps=2).frames.frames] == [0.0, 0.5, 1.0]
    assert [frame.timestamp for frame in video([PNG], timestamps=[3.5]).frames.frames] == [3.5]
    with pytest.raises(ValueError, match="timestamps has 2 entries, but frames has 1"):
        video([PNG], timestamps=[0.0, 1.0])


def test_a_message_has_texts_and_media_in_order() -> None:
    turn = message("user", image(PNG), "what is it?")
    assert turn.role == "user"
    assert [part.WhichOneof("part") for part in turn.parts] == ["media", "text"]
    assert not turn.content


def test_prompts_and_inputs_may_be_mixed() -> None:
    request = generate_request(["a", image(PNG), [1, 2]], None, None, {"lora": "l"})
    assert [part.WhichOneof("part") for part in request.mixed.parts] == ["text", "media", "token_ids"]
    assert request.lora == "l"
    assert list(generate_request([1, 2], None, None, {}).token_ids.ids) == [1, 2]
    assert generate_request([], None, None, {}).WhichOneof("prompt") == "token_ids"
    text, ids, mixed = map(pooling_input, ("a", [1], [image(PNG)]))
    assert (text.text, list(ids.token_ids.ids), mixed.WhichOneof("input")) == ("a", [1], "mixed")


def test_counts_say_what_media_stand_at() -> None:
    assert read_usage(UsageMessage(prompt_tokens=5, media_tokens={"image": 3})).media_tokens == {"image": 3}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_plain_values_become_messages() -> None:
    for output in (StructuredOutput(json_schema=SCHEMA), StructuredOutput(json_schema=json.dumps(SCHEMA))):
        assert json.loads(output.json_schema) == SCHEMA
    assert list(StructuredOutput(choice=["yes", "no"]).choice.options) == ["yes", "no"]
    assert StructuredOutput(json_whitespace="compact") == StructuredOutput(json_whitespace="JSON_WHITESPACE_COMPACT")
    nested = SamplingParams(structured_output={"json_schema": SCHEMA}, temperature=None)
    assert nested == SamplingParams(structured_output=StructuredOutput(json_schema=SCHEMA))
    assert json.loads(Tool(name="f", parameters=SCHEMA).parameters) == SCHEMA
    request = chat_request([{"role": "user", "content": "hi"}], None, None, {"chat_template_kwargs": {"a": 1}})
    assert (request.messages[0].content, request.chat_template_kwargs) == ("hi", '{"a": 1}')


def test_message_classes_are_those_of_the_contract() -> None:
    assert type(SamplingParams()) is sampling_pb2.SamplingParams
    assert isinstance(sampling_pb2.SamplingParams(), SamplingParams)
    assert not isinstance(StructuredOutput(), SamplingParams)
    assert SamplingParams.FromString(SamplingParams(n=2).SerializeToString()).n == 2


@pytest.fixture(scope="module")
def client() -> Client:
    """Return a client whose calls fail before they use the connection."""
    return Client("localhost:1", timeout=1)


WRONG: list[tuple[Callable[[Client], object], str]] = [
    (
        lambda client: client.generate("hi", max_tokens=8),
        "this method has no argument 'max_tokens'; it is a field of SamplingParams: pass "
        "SamplingParams(max_tokens=8) as sampling",
    ),
    (
        lambda client: client.generate("hi", {"max_tokens": 8}),
        "sampling is {'max_tokens': 8}; pass penstock_client.SamplingParams(max_tokens=8)",
    ),
    (
        lambda client: client.generate("hi", LocalSamplingParams()),
        "sampling is of the class penstock_common.types.sampling.SamplingParams; pass penstock_client.SamplingParams(...)",
    ),
    (
        lambda client: client.stream("hi", sampling_params=SamplingParams()),
        "this method has no argument 'sampling_params'; did you mean 'sampling'?",
    ),
    (lambda client: client.generate("hi", modle="a"), "this method has no argument 'modle'; did you mean 'model'?"),
    (lambda client: client.embed(["hi"], max_tokens=8), "this method has no argument 'max_tokens'"),
    (lambda client: client.generate("hi", model=5), "model is 5; it must be a string"),
    (lambda client: client.generate(5), "prompt is 5; it must be a text, a list of token ids, or "),
    (lambda client: client.generate("hi", prediction=5), "prediction.token_ids is 5; it must be TokenIds"),
    (
        lambda client: client.chat("hi"),
        'messages is \'hi\'; it must be a list of ChatMessage, such as [ChatMessage(role="user", content="...")]',
    ),
    (lambda client: client.chat(["hi"]), "messages[0] is 'hi'; it must be ChatMessage"),
    (
        lambda client: client.stream_chat([{"role": "user", "contnet": "hi"}]),
        "messages[0] has no field 'contnet'; did you mean 'content'?",
    ),
    (lambda client: client.chat([], tools=5), "tools is 5; it must be a list; each entry must be Tool"),
    (lambda client: client.embed("hi"), "inputs is 'hi'; it must be a list: pass ['hi']"),
    (lambda client: client.score("hi", "you"), "documents is 'you'; it must be a list: pass ['you']"),
    (lambda client: client.embed(["a", 5]), "inputs[1] is 5; it must be a text"),
    (
        lambda client: client.detokenize([-1]),
        "token_ids is [-1]; it must be a list; each entry must be an integer from 0",
    ),
    (lambda _: SamplingParams(temprature=1.0), "SamplingParams has no field 'temprature'; did you mean 'temperature'?"),
    (lambda _: SamplingParams(temperature="hot"), "SamplingParams.temperature is 'hot'; it must be a number"),
    (
        lambda _: SamplingParams(max_tokens=-1),
        "SamplingParams.max_tokens is -1; it must be an integer from 0 to 4294967295",
    ),
    (lambda _: SamplingParams(stop="."), "SamplingParams.stop is '.'; it must be a list; each entry must be a string"),
    (
        lambda _: SamplingParams(logit_bias={"a": 1}),
        "SamplingParams.logit_bias is {'a': 1}; it must be a dict; each key must be an integer from 0 to 4294967295, and",
    ),
    (
        lambda _: SamplingParams(structured_output="json"),
        "SamplingParams.structured_output is 'json'; it must be StructuredOutput",
    ),
    (
        lambda _: StructuredOutput(json_whitespace="none"),
        "StructuredOutput.json_whitespace is 'JSON_WHITESPACE_NONE'; it must be one of JSON_WHITESPACE_DUMPS, ",
    ),
    (
        lambda _: StructuredOutput(json_schema={"a": {1}}),
        "StructuredOutput.json_schema is {'a': {1}}, which cannot be written as JSON: ",
    ),
    (lambda _: ChatMessage("user"), "ChatMessage takes only named fields, but the first argument is 'user'"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_a_wrong_argument_is_named_with_the_remedy(
    client: Client, call: Callable[[Client], object], message: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        call(client)
    assert str(error.value).startswith(message)
