"""Items of an input that only name an item of an earlier response, as clients send them that rely on stored responses."""

from collections.abc import Sequence

from penstock_frontend.api.openai.responses.response_body import InputItem
from penstock_frontend.api.openai.responses.response_store import ResponseStore

_REFERENCE = "item_reference"


def resolved(given: str | list[InputItem], store: ResponseStore, tenant: str) -> str | list[InputItem]:
    """Return the input with the stored items in place of the references.

    Raises:
        NotFound: A reference names no item of a kept response of the tenant.
        InvalidArgument: There are references, and the server keeps no responses.
    """
    if isinstance(given, str) or not any(item.type == _REFERENCE for item in given):
        return given
    outputs: dict[str, Sequence[InputItem]] = {}
    items = []
    for index, item in enumerate(given):
        if item.type == _REFERENCE:
            response_id = store.holder(tenant, item.id or "", field=f"input[{index}].id")
            if response_id not in outputs:
                outputs[response_id] = store.output(tenant, response_id)
            item = next(each for each in outputs[response_id] if each.id == item.id)
        items.append(item)
    return items
