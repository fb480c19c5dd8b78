"""Layers dealt out to stages by bytes, or as the settings say."""

import pytest

from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.parallel.stage_plan import deal_layers


def numbers(layers: list[int], num_stages: int, *, behind: int = 0) -> list[int]:
    dealt = deal_layers("Model", layers, behind=behind, num_stages=num_stages)
    assert [i for own in dealt for i in own] == list(range(len(layers)))
    return [len(own) for own in dealt]


@pytest.mark.parametrize(
    ("layers", "num_stages", "behind", "expected"),
    [
        ([1] * 8, 2, 0, [4, 4]),
        ([1] * 8, 2, 2, [5, 3]),
        ([1] * 7, 3, 0, [2, 2, 3]),
        ([1] * 9, 3, 3, [4, 4, 1]),
        ([1] * 4, 4, 100, [1, 1, 1, 1]),
        ([9, 1, 1, 1], 2, 0, [1, 3]),
        ([1, 1, 1, 9], 3, 0, [1, 2, 1]),
        ([5], 1, 1, [1]),
    ],
)
def test_the_largest_stage_has_as_few_bytes_as_can_be(
    layers: list[int], num_stages: int, behind: int, expected: list[int]
) -> None:
    assert sorted(numbers(layers, num_stages, behind=behind)) == sorted(expected)
    if behind or len(expected) == 2:
        assert numbers(layers, num_stages, behind=behind) == expected


def test_a_deep_model_is_dealt_out_to_many_stages() -> None:
    assert max(numbers([1] * 200, 64)) == 4


def test_stages_may_be_given() -> None:
    dealt = deal_layers("Model", [1] * 6, behind=0, num_stages=3, stage_layers=(1, 3, 2))
    assert dealt == [range(1), range(1, 4), range(4, 6)]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="executor.pipeline_parallel_size is 3; Model has 2 layers.*at most 2"):
        numbers([1, 1], 3)


def test_numbers_that_do_not_sum_up_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"executor.stage_layers are 7 layers in all; Model has 6; change .* by 1"):
        deal_layers("Model", [1] * 6, behind=0, num_stages=2, stage_layers=(3, 4))
