"""The store of responses: stored responses, and the order of eviction."""

import msgspec
import pytest

from penstock_common.errors import InvalidArgument, NotFound
from penstock_common.types.media import TensorData
from penstock_frontend.api.openai.responses.response import MessageItem, OutputText, ReasoningBody, Response, TextBody
from penstock_frontend.api.openai.responses.response_store import ResponseStore, Running
from penstock_frontend.call_types import (
    ChatMessage,
    ContentPart,
    EncodedFile,
    Features,
    Frame,
    Frames,
    MediaPart,
    Source,
    Url,
)
from penstock_frontend.config import ResponsesConfig


def response(name: str) -> Response:
    return Response(
        id=name,
        created_at=1,
        status="completed",
        instructions=None,
        max_output_tokens=None,
        metadata={},
        model="m",
        parallel_tool_calls=True,
        previous_response_id=None,
        reasoning=ReasoningBody(),
        store=True,
        temperature=None,
        text=TextBody(),
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=None,
        user=None,
    )


def keep(store: ResponseStore, tenant: str, name: str, length: int = 10, *items: str) -> None:
    output = [MessageItem(id=item, status="completed", content=[OutputText(text=item)]) for item in items]
    ended = msgspec.structs.replace(response(name), output=output)
    store.keep(tenant, ended, [], [ChatMessage(role="user", content="x" * length)])


def there(store: ResponseStore, tenant: str, *names: str) -> list[str]:
    found = []
    for name in names:
        try:
            store.get(tenant, name)
        except NotFound:
            continue
        found.append(name)
    return found


def test_the_conversation_comes_back() -> None:
    store = ResponseStore(ResponsesConfig())
    keep(store, "", "a", 3)
    [message] = store.messages("", "a")
    assert (message.role, message.content) == ("user", "xxx")


def test_media_of_a_conversation_come_back() -> None:
    store = ResponseStore(ResponsesConfig())
    sources: list[Source] = [
        EncodedFile(b"\x00\xff"),
        Url("data:,x"),
        Frames([Frame(b"\x01", 0.5)]),
        Features({"embeds": TensorData("float32", (1, 1), b"abcd")}),
    ]
    content = [
        ContentPart(type="media", media=MediaPart(modality="image", source=each, field="f", processor_kwargs={"a": 1}))
        for each in sources
    ]
    messages = [ChatMessage(role="user", content=[ContentPart(type="text", text="look"), *content])]
    store.keep("", response("a"), [], messages)
    assert [message.content for message in store.messages("", "a")] == [messages[0].content]


def test_the_oldest_of_the_tenant_with_the_most_goes_first() -> None:
    store = ResponseStore(ResponsesConfig(max_stored=4))
    keep(store, "small", "a")
    for name in "bcdef":
        keep(store, "large", name)
    assert there(store, "small", *"a") == ["a"]
    assert there(store, "large", *"bcdef") == ["d", "e", "f"]
    assert there(store, "small", *"bcdef") == []


def test_bytes_are_bounded_also_when_responses_are_deleted() -> None:
    store = ResponseStore(ResponsesConfig(max_stored_bytes=10_000))
    for name in "abc":
        keep(store, "", name, 4000)
    assert there(store, "", *"abc") == ["b", "c"]
    store.delete("", "b")
    keep(store, "", "d", 4000)
    assert there(store, "", *"abcd") == ["c", "d"]
    keep(store, "", "e", 20_000)
    assert there(store, "", *"cde") == ["c", "d"]


def test_items_go_with_their_response() -> None:
    store = ResponseStore(ResponsesConfig(max_stored=2))
    keep(store, "t", "a", 10, "a1", "a2")
    keep(store, "t", "b", 10, "b1")
    assert [store.holder("t", item, field="f") for item in ("a1", "a2", "b1")] == ["a", "a", "b"]
    assert [item.id for item in store.output("t", "a")] == ["a1", "a2"]
    with pytest.raises(NotFound):
        store.holder("other", "a1", field="f")
    keep(store, "t", "c")
    store.delete("t", "b")
    for item in ("a1", "a2", "b1"):
        with pytest.raises(NotFound, match="f is"):
            store.holder("t", item, field="f")


def test_one_in_the_making_ends_when_it_is_deleted() -> None:
    store, cancelled = ResponseStore(ResponsesConfig()), []
    store.begin("t", Running(response("a"), [], lambda: cancelled.append("a")))
    assert store.running("t", "a") is not None
    assert store.running("other", "a") is None
    store.delete("t", "a")
    assert cancelled == ["a"]
    assert not store.end("t", "a"), "and is not kept when it has ended"


def test_nothing_is_found_where_nothing_is_kept() -> None:
    store = ResponseStore(ResponsesConfig(max_stored=0))
    assert not store.enabled
    with pytest.raises(InvalidArgument, match=r"http\.responses\.max_stored is 0") as caught:
        store.messages("", "a")
    assert caught.value.field == "previous_response_id"
