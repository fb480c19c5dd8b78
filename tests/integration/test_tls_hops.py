"""mTLS on every connection between components: accepted peers, refused peers, and the refusal's code.

Other connections are unaffected.
"""

from pathlib import Path

import pytest

from tests.fakes.network.certificates import Authority
from tests.fakes.systems.hops import HOPS, Sites

OPEN_TO_ALL = ("client to frontend", "client to frontend over HTTP")
"""Connections that accept every certificate of the authority. API keys determine the rights of these clients."""


@pytest.mark.parametrize("name", HOPS)
async def test_only_the_right_certificate_gets_in_and_streams_of_others_go_on(
    name: str, tmp_path: Path, model: Path
) -> None:
    ours, theirs = Authority("ours"), Authority("theirs")
    async with HOPS[name](Sites(ours, tmp_path, model)) as hop:
        cases = {
            "right": (ours.issue(hop.right), ours.ca, "OK"),
            "of another authority": (theirs.issue(hop.right), ours.ca, "UNAVAILABLE"),
            "expired": (ours.issue(hop.right, expired=True), ours.ca, "UNAVAILABLE"),
            "not valid yet": (ours.issue(hop.right, early=True), ours.ca, "UNAVAILABLE"),
            "no certificate": (None, ours.ca, "UNAVAILABLE"),
            "for another service": (
                ours.issue("penstock-somebody"),
                ours.ca,
                "OK" if name in OPEN_TO_ALL else "PERMISSION_DENIED",
            ),
            "a client that trusts another authority": (ours.issue(hop.right), theirs.ca, "UNAVAILABLE"),
            "no TLS": (None, b"", "UNAVAILABLE"),
        }
        seen = {}
        for case, (identity, ca, _) in cases.items():
            seen[case] = await hop.attempt(identity, ca)
            await hop.alive()
        assert seen == {case: code for case, (_, _, code) in cases.items()}
