"""What ``$ref`` names within one schema document."""

import re
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from penstock_enginecore.structured_output.constraints.json_types import SchemaError, escaped, shown

_INDEX = re.compile("[0-9]{1,9}")
_VALUES = frozenset({"const", "enum", "default", "examples", "example"})
"""Keywords whose values are no schemas."""


class Document:
    """A schema with the places that its ``$ref`` can name: JSON pointers, ``$anchor`` and ``$id``."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._names: dict[str, str] | None = None

    def pointer(self, reference: Any, path: str) -> str:
        """The JSON pointer, behind ``#``, of the place that the ``$ref`` at ``path`` names. Raises SchemaError unless it is in
        this document.
        """
        field = f"{path}/$ref"
        if not isinstance(reference, str):
            raise SchemaError(field, f"is {shown(reference)}; it must be a string")
        base, base_pointer = self._base(path)
        if reference == "#" or reference.startswith("#/"):
            pointer = base_pointer + reference[1:]
            if base_pointer != "#" and not self._has(pointer) and self._has(reference):
                pointer = reference  # generators put an $id below the root and still count from it
        else:
            pointer = self._named(_joined(base, reference), reference)
        if not self._has(pointer) and not reference.startswith("#"):
            raise SchemaError(
                field,
                f"is {shown(reference)}; only places of this schema can be referred to: #/... or a $id or $anchor of it",
            )
        if not self._has(pointer):
            raise SchemaError(field, f"is {shown(reference)}, which this schema does not have")
        return pointer

    def at(self, pointer: str) -> Any:
        """The schema at a place that ``pointer`` returned."""
        return self._look(pointer)[1]

    def _has(self, pointer: str) -> bool:
        return self._look(pointer)[0]

    def _look(self, pointer: str) -> tuple[bool, Any]:
        here = self.root
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(here, dict) and key in here:
                here = here[key]
            elif isinstance(here, list) and _INDEX.fullmatch(key) and int(key) < len(here):
                here = here[int(key)]
            else:
                return False, None
        return True, here

    def _named(self, absolute: str, reference: str) -> str:
        """The pointer of a place that is named by its ``$id`` or ``$anchor``, with a pointer from there; ``reference`` itself
        where there is no such place.
        """
        if self._names is None:
            self._names = {}
            self._index(self.root, "#", "", self._names)
        if absolute in self._names:
            return self._names[absolute]
        resource, fragment = urldefrag(absolute)
        if resource in self._names and (not fragment or fragment.startswith("/")):
            return self._names[resource] + fragment
        return f"#/{reference}"

    def _index(self, schema: Any, pointer: str, base: str, names: dict[str, str]) -> None:
        """Add to ``names`` what the schemas from ``pointer`` on call themselves."""
        if isinstance(schema, list):
            for index, part in enumerate(schema):
                self._index(part, f"{pointer}/{index}", base, names)
        if not isinstance(schema, dict):
            return
        if (name := _id(schema)) is not None:
            base = _joined(base, name)
            names.setdefault(base.removesuffix("#"), pointer)
        if isinstance(anchor := schema.get("$anchor"), str):
            names.setdefault(f"{base}#{anchor}", pointer)
        for key, part in schema.items():
            if key not in _VALUES:
                self._index(part, f"{pointer}/{escaped(key)}", base, names)

    def _base(self, path: str) -> tuple[str, str]:
        """What references at ``path`` are relative to: the address, and the place of the schema that has it."""
        base, place, here, walked = "", "#", self.root, "#"
        parts = path.split("/")[1:]
        for part in [None, *parts]:
            if part is not None:
                key = part.replace("~1", "/").replace("~0", "~")
                if isinstance(here, dict):
                    here = here.get(key)
                elif isinstance(here, list) and _INDEX.fullmatch(key) and int(key) < len(here):
                    here = here[int(key)]
                else:
                    break
                walked = f"{walked}/{part}"
            if isinstance(here, dict) and (name := _id(here)) is not None:
                base = _joined(base, name)
                if not name.startswith("#"):
                    place = walked
        return base, place


def _id(schema: dict[str, Any]) -> str | None:
    """The name that a schema gives itself: ``$id``, or ``id`` in draft 4, where it stands in place of a property of that name."""
    name = schema.get("$id", schema.get("id"))
    return name if isinstance(name, str) else None


def _joined(base: str, reference: str) -> str:
    """``reference`` as an address, relative to ``base``; itself where it is no address."""
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference
