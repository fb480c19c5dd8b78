import pytest

from penstock_frontend.api.anthropic.protocol import SourceBody
from penstock_frontend.api.anthropic.turns import image_of
from penstock_frontend.call_types import Url


@pytest.mark.parametrize(
    ("data", "source"),
    [
        ("iVBORw0KGgo=", Url("data:;base64,iVBORw0KGgo=", unwritten=13)),
        ("data:image/png;base64,iVBORw0KGgo=", Url("data:image/png;base64,iVBORw0KGgo=")),
    ],
)
def test_the_data_of_an_image_are_base64_or_a_data_url(data: str, source: Url) -> None:
    body = SourceBody(type="base64", media_type="image/png", data=data)
    part = image_of(body, "messages[0]", "content[1].source")
    assert part.source == source
    assert part.field == "content[1].source.data"
