"""The field ``response_format``."""

import msgspec


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """A schema in OpenAI's form. It is always enforced, whatever ``strict`` says."""

    schema: msgspec.Raw
    name: str = ""
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """The form of the output: ``text``, ``json_object``, ``json_schema``, or ``structural_tag`` as xgrammar writes it."""

    type: str
    json_schema: JsonSchemaFormat | None = None
