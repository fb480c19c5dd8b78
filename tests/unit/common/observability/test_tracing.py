"""Trace contexts and the configuration of traces; the spans themselves are in tests/integration/test_traces.py."""

import pytest

from penstock_common.config.sections import LogConfig, TracingConfig
from penstock_common.errors import ConfigError
from penstock_common.observability.tracer import make_tracer
from penstock_common.observability.tracing import is_sampled, trace_headers

PARENT = f"00-{'1' * 32}-{'2' * 16}"


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"{PARENT}-01", True),
        (f"{PARENT}-03", True),
        (f"{PARENT}-00", False),
        (f"{PARENT}-02", False),
        (PARENT, False),
        (f"{PARENT}-zz", False),
        (f"{PARENT}-1", False),
        ("", False),
    ],
)
def test_the_flags_of_a_trace_context_say_whether_it_is_recorded(header: str, sampled: bool) -> None:
    assert is_sampled({"traceparent": header}) is sampled


def test_a_request_without_a_trace_context_is_not_recorded() -> None:
    assert not is_sampled({})


def test_only_the_headers_of_the_trace_context_are_handed_on() -> None:
    given = {"traceparent": "a", "tracestate": "b", "authorization": "secret"}
    assert trace_headers(given) == {"traceparent": "a", "tracestate": "b"}


def test_without_an_endpoint_there_is_no_tracer() -> None:
    assert make_tracer(TracingConfig(), service="frontend", instance="f") is None


@pytest.mark.parametrize(
    "endpoint", ["collector:4317", "http://collector:4317", "https://10.0.0.1:4317/", "[::1]:4317"]
)
def test_endpoints_are_addresses_or_urls(endpoint: str) -> None:
    assert TracingConfig(endpoint=endpoint).endpoint == endpoint


@pytest.mark.parametrize("endpoint", ["collector", "ftp://collector:1", "http://user:pw@collector:1", "a b:1"])
def test_another_endpoint_is_refused_with_what_it_must_be(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing.endpoint is .*; it must be host:port or http"):
        TracingConfig(endpoint=endpoint)


def test_prompts_are_logged_with_requests_or_not_at_all() -> None:
    with pytest.raises(ConfigError, match=r"log.prompts is true, but log.requests is false"):
        LogConfig(prompts=True)
