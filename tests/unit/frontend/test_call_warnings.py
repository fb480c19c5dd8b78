"""Warnings of calls: the header, the log line for each client, and the counter."""

import asyncio
import contextvars

import structlog
from prometheus_client import CollectorRegistry

from penstock_frontend.call_warnings import CallWarnings, WarningKind, WarningLog, name_fields, warn

LEFT_OUT, AS_TEXT = WarningKind.TOOL_LEFT_OUT, WarningKind.HISTORY_AS_TEXT


def headers(*texts: str) -> dict[str, str]:
    warnings = CallWarnings(WarningLog(), "a")
    for text in texts:
        warnings.add(LEFT_OUT, "tools[0]", text)
    return warnings.headers


def logged(log: WarningLog, client: str, kind: WarningKind, field: str = "tools[0]") -> list[tuple[str, str, str]]:
    with structlog.testing.capture_logs() as logs:
        log.begin(client).add(kind, field, "x")
    return [(each["kind"], each["field"], each["client"]) for each in logs]


def test_a_call_without_warnings_has_no_header() -> None:
    assert headers() == {}


def test_several_warnings_are_one_value_and_each_stands_there_once() -> None:
    expected = "tool_left_out: tools[0] is a; tool_left_out: tools[0] is b"
    assert headers("is a", "is b", "is a") == {"penstock-warning": expected}


def test_a_value_is_printable_ascii_and_has_no_separator_inside() -> None:
    [value] = headers("is 'ü\r\nset-cookie: a; b\x7f'").values()
    assert value == "tool_left_out: tools[0] is '???set-cookie: a, b?'"


def test_a_value_is_bounded_and_says_how_many_warnings_it_leaves_out() -> None:
    [value] = headers(*(f"{number} {'x' * 1000}" for number in range(50))).values()
    texts = value.split("; ")
    assert len(value) <= 1024
    assert [len(text) for text in texts[:-1]] == [240] * 4
    assert texts[-1] == "and 46 more"


def test_a_kind_is_logged_once_per_client() -> None:
    log = WarningLog()
    assert logged(log, "a", LEFT_OUT) == [("tool_left_out", "tools[0]", "a")]
    assert logged(log, "a", LEFT_OUT, "tools[1]") == []
    assert logged(log, "a", AS_TEXT) == [("history_as_text", "tools[0]", "a")]
    assert logged(log, "b", LEFT_OUT) == [("tool_left_out", "tools[0]", "b")]


def test_every_warning_is_counted_under_its_kind() -> None:
    registry = CollectorRegistry()
    log = WarningLog(registry)
    for kind in (LEFT_OUT, LEFT_OUT, AS_TEXT):
        log.begin("a").add(kind, "tools[0]", "x")
    for kind, count in ((LEFT_OUT, 2), (AS_TEXT, 1)):
        assert registry.get_sample_value("penstock:request_warnings_total", {"kind": kind.value}) == count


async def test_a_warning_belongs_to_the_call_that_its_task_serves() -> None:
    log = WarningLog()

    async def call(client: str) -> dict[str, str]:
        warnings = log.begin(client)
        await asyncio.sleep(0)
        await asyncio.to_thread(warn, LEFT_OUT, "tools[0]", f"is {client}'s")
        return warnings.headers

    found = await asyncio.gather(*(asyncio.create_task(call(client)) for client in "ab"))
    assert found == [{"penstock-warning": f"tool_left_out: tools[0] is {client}'s"} for client in "ab"]


def test_outside_of_a_call_a_warning_is_logged() -> None:
    with structlog.testing.capture_logs() as logs:
        contextvars.Context().run(warn, WarningKind.HINT_IGNORED, "outside", "x")
    assert [(log["kind"], log["field"], log["client"]) for log in logs] == [("hint_ignored", "outside", "local")]


async def test_fields_of_later_warnings_are_the_clients() -> None:
    warnings = WarningLog().begin("a")
    warn(AS_TEXT, "messages[1]", "is the client's own name")
    name_fields({"messages[1]": "input[3]", "messages": "input"})
    warn(AS_TEXT, "messages[1].content[0]", "x")
    warn(AS_TEXT, "messages[12]", "y")
    fields = [text.split()[1] for text in warnings.headers["penstock-warning"].split("; ")]
    assert fields == ["messages[1]", "input[3].content[0]", "input[12]"]
