"""Pages of the list of models in Anthropic's protocol."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock_common.errors import InvalidArgument
from penstock_frontend.api.anthropic.models import AnthropicModels, ModelPage

NAMES = ["base", "a", "b", "c"]


async def page(**query: str) -> tuple[list[str], bool, str | None, str | None]:
    model = SimpleNamespace(llm=SimpleNamespace(engines=SimpleNamespace(view=SimpleNamespace(limits=None))))
    models: Any = SimpleNamespace(names=lambda: NAMES, named=lambda _: model, created=0)
    call: Any = SimpleNamespace(query=query)
    found = await AnthropicModels(models).list(call, None)  # type: ignore[arg-type]
    assert isinstance(found, ModelPage)
    assert all((each.created_at, each.max_input_tokens) == ("1970-01-01T00:00:00Z", None) for each in found.data)
    return [each.id for each in found.data], found.has_more, found.first_id, found.last_id


@pytest.mark.parametrize(
    ("query", "names", "more"),
    [
        ({}, NAMES, False),
        ({"limit": "2"}, ["base", "a"], True),
        ({"limit": "4"}, NAMES, False),
        ({"limit": "2", "after_id": "a"}, ["b", "c"], False),
        ({"limit": "1", "after_id": "a"}, ["b"], True),
        ({"limit": "2", "before_id": "c"}, ["a", "b"], True),
        ({"limit": "3", "before_id": "c"}, ["base", "a", "b"], False),
        ({"after_id": "c"}, [], False),
    ],
    ids=str,
)
async def test_a_page_has_what_its_query_asks_for(query: dict[str, str], names: list[str], more: bool) -> None:
    ends = (names[0], names[-1]) if names else (None, None)
    assert await page(**query) == (names, more, *ends)


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "", "²"])
async def test_a_limit_out_of_range_is_refused(limit: str) -> None:
    with pytest.raises(InvalidArgument, match="it must be from 1 to 1000"):
        await page(limit=limit)
