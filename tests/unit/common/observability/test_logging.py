"""Logs of a process, in a process of its own: they are set up once for all of it."""

import json
import logging
import re
import subprocess
import sys
from typing import Any

import pytest

from penstock_common.observability.logging import LimitedLog, incident
from tests.fakes.patience import PATIENCE

PROGRAM = """
import logging, sys, threading
import structlog
from penstock_common.config.sections import LogConfig
from penstock_common.observability.logging import REQUEST_LOGGER, configure, get_logger
configure(LogConfig(format=sys.argv[1], requests=sys.argv[2] == "yes"), service="frontend")
structlog.contextvars.bind_contextvars(request="r1")
get_logger().info("bound", count=1)
get_logger().debug("too fine")
thread = threading.Thread(target=lambda: get_logger().warning("of another thread"))
thread.start()
thread.join()
logging.getLogger("penstock_enginecore.core").info("%d steps", 3)
logging.getLogger("another.library").info("not shown")
logging.getLogger("another.library").warning("trouble", exc_info=ValueError("a line\\nand another"))
logging.getLogger(REQUEST_LOGGER).info("request failed", extra={"request": "r2", "code": "INTERNAL"})
"""


def run(format_: str, requests: str = "no") -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, format_, requests], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    return done.stderr


def events(requests: str = "no") -> dict[str, dict[str, Any]]:
    return {line["event"]: line for line in map(json.loads, run("json", requests).splitlines())}


@pytest.fixture(scope="module")
def lines() -> dict[str, dict[str, Any]]:
    return events("yes")


def test_every_line_has_time_level_and_service_from_any_thread_and_library(lines: dict[str, dict[str, Any]]) -> None:
    assert sorted(lines) == ["3 steps", "bound", "of another thread", "request failed", "trouble"]
    assert {line["service"] for line in lines.values()} == {"frontend"}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", line["timestamp"]) for line in lines.values())
    assert [lines[name]["level"] for name in ("bound", "of another thread", "trouble")] == [
        "info",
        "warning",
        "warning",
    ]


def test_what_a_task_bound_is_on_its_lines_and_not_on_those_of_others(lines: dict[str, dict[str, Any]]) -> None:
    assert (lines["bound"]["request"], lines["bound"]["count"]) == ("r1", 1)
    assert "request" not in lines["of another thread"]


def test_an_exception_stays_on_its_line(lines: dict[str, dict[str, Any]]) -> None:
    assert "ValueError: a line\nand another" in lines["trouble"]["exception"]


def test_extras_of_the_standard_library_are_fields(lines: dict[str, dict[str, Any]]) -> None:
    assert (lines["request failed"]["request"], lines["request failed"]["code"]) == ("r2", "INTERNAL")


def test_lines_about_requests_are_off_unless_asked_for() -> None:
    assert sorted(events()) == ["3 steps", "bound", "of another thread", "trouble"]


def test_text_is_a_line_per_event_for_people() -> None:
    text = run("text")
    assert re.search(r"^\d\d:\d\d:\d\d \[info\] bound count=1 request=r1$", text, re.MULTILINE)
    assert re.search(r"^\d\d:\d\d:\d\d \[info\] 3 steps", text, re.MULTILINE)


HOSTILE = """
import logging
from penstock_common.config.sections import LogConfig
from penstock_common.observability.logging import configure, configure_library, get_logger
{configure}
hostile = "".join(map(chr, [27, 0x9B, 7, 8, 13, 10, 0, 127, 0x85, 0x2028, 0x2029, 0x202E, 0x2066, 0x200F, 0x61C, 0xD800]))
hostile = "<" + hostile + ">"
get_logger().warning("event " + hostile, field=hostile, spaced="a b" + hostile, listed=[hostile], error=ValueError(hostile))
logging.getLogger("another.library").warning("library %s", hostile, extra={{"more": hostile}})
try:
    raise ValueError(hostile)
except ValueError:
    get_logger().exception("raised")
"""
ESCAPED = r"<\x1b\x9b\x07\x08\r\n\x00\x7f\x85\u2028\u2029\u202e\u2066\u200f\u061c\ud800>"


def run_hostile(configure: str) -> str:
    program = HOSTILE.format(configure=configure)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=PATIENCE, check=True)
    return done.stderr.decode()


def test_what_clients_send_moves_no_cursor_in_text() -> None:
    text = run_hostile('configure(LogConfig(format="text"), service="frontend")')
    assert all(each.isprintable() for each in text.split("\n"))
    assert text.count(ESCAPED) == 7
    assert f"event {ESCAPED} " in text
    assert f"field='{ESCAPED}'" in text
    assert f"spaced='a b{ESCAPED}'" in text
    assert f"library {ESCAPED} " in text
    assert "ValueError: " + ESCAPED.replace(r"\n", "\n") in text, "the lines of a traceback stay lines"


def test_warnings_inside_a_program_move_no_cursor_either() -> None:
    text = run_hostile("configure_library()")
    first = text.split("\n")[0]
    assert f"event {ESCAPED}" in first
    assert f"field='{ESCAPED}'" in first


def test_json_says_what_clients_sent() -> None:
    text = run_hostile('configure(LogConfig(format="json"), service="frontend")')
    line = json.loads(text.splitlines()[0])
    assert line["field"].startswith("<\x1b\x9b\x07")
    assert text.isascii()


CHANGING = """
import logging, sys
from penstock_common.config.sections import LogConfig
from penstock_common.observability.logging import REQUEST_LOGGER, configure, get_logger
log = get_logger()
library, requests = logging.getLogger("penstock_enginecore.core"), logging.getLogger(REQUEST_LOGGER)
for config in (
    LogConfig(level="info", format="json"),
    LogConfig(level="debug", format="json", requests=True),
    LogConfig(level="warning", format="json", requests=True),
    LogConfig(level="info", format="text"),
):
    configure(config, service="frontend")
    log.debug("ours at debug")
    log.info("ours at info")
    library.debug("library at debug")
    library.info("library at info")
    requests.info("a request")
    print("--", file=sys.stderr)
"""


def test_another_configuration_holds_for_loggers_that_are_in_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHANGING], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    *as_json, as_text, _ = done.stderr.split("--\n")
    at_info = ["ours at info", "library at info"]
    at_debug = ["ours at debug", "ours at info", "library at debug", "library at info", "a request"]
    assert [[json.loads(line)["event"] for line in part.splitlines()] for part in as_json] == [at_info, at_debug, []]
    assert [re.sub(r"^\S+ \[info\] ", "", line).split(" [")[0] for line in as_text.splitlines()] == at_info


# Rate-limited warnings that any peer can cause: each event is logged once per interval, with the number of omitted
# lines.


def test_an_event_is_written_once_per_interval_with_the_number_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    log = LimitedLog(logging.getLogger("limited"), 10.0, lambda: now[0])
    for number in range(1000):
        log.warning("refused", peer=number)
    log.warning("another", peer="x")
    now[0] += 9.9
    log.warning("refused", peer="too early")
    now[0] += 0.2
    log.warning("refused", peer="later")
    found = [(each.message, each.__dict__["peer"], each.__dict__.get("left_out")) for each in caplog.records]
    assert found == [("refused", 0, None), ("another", "x", None), ("refused", "later", 1000)]


def raised() -> Exception:
    try:
        raise RuntimeError("the token of somebody else")
    except RuntimeError as e:
        return e


def test_an_incident_has_a_number_that_the_log_and_the_client_share(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        told = incident(raised(), request="r1", doing="validating the request")
    (record,) = caplog.records
    number = record.__dict__["incident"]
    assert re.fullmatch(r"[0-9a-f]{8}", number)
    assert number in told.message
    assert record.__dict__["request"] == "r1"


def test_the_stack_is_in_the_log_and_the_errors_text_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        told = incident(raised(), request="r1", doing="validating the request")
    assert "in raised" in caplog.text
    assert "somebody" not in told.message
    assert (told.code, told.reason) == ("INTERNAL", "INCIDENT")


def test_two_incidents_have_different_numbers() -> None:
    first, second = (incident(raised(), request="r1", doing="x").message for _ in range(2))
    assert first != second
