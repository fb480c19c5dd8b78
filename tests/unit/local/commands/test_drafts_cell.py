"""The cell that says what an engine's drafts have brought."""

from typing import Any

import pytest

from penstock_local.commands.status import drafts_of

COUNTS = {"num_drafts": 10, "num_draft_tokens": 40, "num_accepted_tokens": 15}


@pytest.mark.parametrize(
    ("info", "cell"),
    [
        ({}, ""),
        ({"speculative": None}, ""),
        ({"speculative": {"method": "ngram", "failure": "", **dict.fromkeys(COUNTS, 0)}}, "ngram -"),
        ({"speculative": {"method": "suffix", "failure": "", **COUNTS}}, "suffix 2.50 (38%)"),
        ({"speculative": {"method": "draft_model", "failure": "out of memory", **COUNTS}}, "draft_model off"),
    ],
)
def test_the_cell_has_the_method_the_mean_length_and_the_share_that_held(info: dict[str, Any], cell: str) -> None:
    assert drafts_of(info).plain == cell
