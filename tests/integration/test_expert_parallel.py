"""Engines that divide the experts of a model: transformers' tokens, and the logits of a single engine.

``make expert-matrix`` runs more combinations.
"""

import pytest

from tests.expert_matrix.family import cells

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "ways"),
    [
        ("qwen3_moe", ((2, "allgather"), (3, "alltoall"), (2, "reduce_scatter"))),
        ("deepseek_v3", ((3, "allgather"),)),
        ("gpt_oss", ((2, "alltoall"),)),
        ("qwen3_5_moe", ((2, "allgather"), (2, "reduce_scatter"))),
        ("lfm2_moe", ((2, "allgather"),)),
    ],
)
def test_tokens_are_transformers_and_logits_those_of_one_engine(family: str, ways: tuple[tuple[int, str], ...]) -> None:
    for (size, dispatch), cell in zip(ways, cells(family, ways), strict=True):
        assert cell.tokens, (size, dispatch, cell.why)
        assert cell.bits or dispatch == "reduce_scatter", (size, dispatch)
