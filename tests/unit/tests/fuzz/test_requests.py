"""Requests of the fuzzer: generated from seed and number only, with faults at every place."""

from tests.fuzz.findings import Findings
from tests.fuzz.rpc_calls import End


def test_findings_of_one_kind_are_one_with_the_smallest_request() -> None:
    findings = Findings()
    findings.variant = "plain"

    findings.ended("Generate", End("INTERNAL", "INTERNAL: engine 127.0.0.1:4711 is gone"), 7, "large", 900)
    findings.ended("Generate", End("INTERNAL", "INTERNAL: engine 127.0.0.1:4712 is gone"), 9, "small", 20)

    (found,) = findings.rows()
    assert (found.count, found.numbers, found.shown) == (2, [7, 9], "small")


def test_a_cause_that_is_known_replaces_the_suspects() -> None:
    findings = Findings()

    findings.happened("a session broke", "it did", [1, 2, 3], sure=False)
    findings.happened("a session broke", "it did", [2])

    (found,) = findings.rows()
    assert (found.numbers, found.sure) == ([2], True)
