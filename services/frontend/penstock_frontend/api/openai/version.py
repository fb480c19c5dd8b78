"""``/version``: of this frontend."""

import importlib.metadata

import msgspec

from penstock_frontend.api.openai.bodies import Body
from penstock_frontend.api.openai.endpoint import Answer, Call


class Version(msgspec.Struct, frozen=True):
    """The answer."""

    version: str


async def version(call: Call, given: Body) -> Answer:
    """The version of the distribution."""
    del call, given
    return Version(importlib.metadata.version("penstock-frontend"))
