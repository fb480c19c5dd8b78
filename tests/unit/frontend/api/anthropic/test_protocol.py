"""Thinking in the signatures of blocks that omit it."""

import pytest

from penstock_frontend.api.anthropic.protocol import opened, sealed


@pytest.mark.parametrize("thinking", ["", "A city.", "Köln 🙂\n" * 1000])
def test_what_is_sealed_is_opened(thinking: str) -> None:
    assert opened(sealed(thinking)) == thinking


@pytest.mark.parametrize(
    "signature", ["", "EqQBCgIYAhIM", "penstock.thinking.%", "penstock.thinking./w==", "penstock.thinking.é"]
)
def test_other_signatures_have_no_thinking(signature: str) -> None:
    assert opened(signature) == ""
