"""Writes the reference of the gRPC contracts: services, methods, messages, fields and enums of the .proto files."""

import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc_tools
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

from docs.site.pages import API_FOLDER, ROOT

PROTOS = ROOT / "protos"
_HEAD = "---\nmyst:\n  enable_extensions: [deflist]\n---\n"
_SPECIAL = re.compile(r"([\\<>*_\[\]{}$|])")
_PACKAGES = {
    "penstock.inference": "Public API: generate, chat, embed, classify, score",
    "penstock.admin": "API for operators: engines, adapters, pauses, profiles",
    "penstock.common": "Messages that several contracts share",
    "penstock.coordinator": "Internal: membership and load, between coordinator, frontends and engines",
    "penstock.enginecore": "Internal: requests and outputs, between frontends and engines",
    "penstock.kvtransfer": "Internal: KV blocks, between engines",
    "penstock.worker": "Internal: nodes of an engine",
    "externalscaler": "Contract of KEDA that the coordinator serves for autoscaling",
}
"""Purpose of each package, by the beginning of its name. Public packages come first."""


def descriptors() -> FileDescriptorSet:
    """Compile the contracts with their comments. Raises RuntimeError if protoc refuses them."""
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    files = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "penstock").rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "descriptors.binpb"
        flags = ["--include_source_info", f"--descriptor_set_out={out}"]
        if code := protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *flags, *files]):
            raise RuntimeError(f"protoc ended with {code}")
        return FileDescriptorSet.FromString(out.read_bytes())


def proto_pages() -> dict[str, str]:
    """Return the pages in Markdown by their names: an index, and one page for each package."""
    packages: dict[str, list[FileDescriptorProto]] = defaultdict(list)
    for file in descriptors().file:
        packages[file.package].append(file)
    names = sorted(packages, key=_rank)
    pages = {f"{API_FOLDER}/contracts.md": _index(names)}
    for name in names:
        pages[f"{API_FOLDER}/contracts/{name}.md"] = "\n".join(_page(name, packages[name])) + "\n"
    return pages


def _rank(package: str) -> tuple[int, str]:
    order = [index for index, prefix in enumerate(_PACKAGES) if package.startswith(prefix)]
    return (order[0] if order else len(_PACKAGES), package)


def _about(package: str) -> str:
    return next((text for prefix, text in _PACKAGES.items() if package.startswith(prefix)), "Contract")


def _index(packages: Sequence[str]) -> str:
    rows = [f"| [{name}](contracts/{name}.md) | {_about(name)} |" for name in packages]
    toctree = ["```{toctree}", ":hidden:", ":titlesonly:", "", *(f"contracts/{name}" for name in packages), "```"]
    head = "# gRPC contracts\n\nThese pages are generated from the `.proto` files of the repository.\n"
    return "\n".join([head, "| package | contents |", "|---|---|", *rows, "", *toctree, ""])


def _page(package: str, files: Sequence[FileDescriptorProto]) -> Iterator[str]:
    readers = [_Reader(file) for file in files]
    yield f"{_HEAD}\n# {package}\n\n{_about(package)}.\n"
    for reader in readers:
        for index, service in enumerate(reader.file.service):
            yield from reader.service(service, (6, index))
    for reader in readers:
        for index, message in enumerate(reader.file.message_type):
            yield from reader.message(message, (4, index), package)
    for reader in readers:
        for index, enum in enumerate(reader.file.enum_type):
            yield from reader.enum(enum, (5, index), package)


class _Reader:
    """Writes the parts of one file. A path is the place of a part in the file, as SourceCodeInfo has it."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self.file = file
        self._comments = {
            tuple(place.path): place.leading_comments or place.trailing_comments
            for place in file.source_code_info.location
        }

    def service(self, service: ServiceDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        """Yield the section of a service."""
        yield from self._heading(2, f"{self.file.package}.{service.name}", f"Service {service.name}", path)
        for index, method in enumerate(service.method):
            taken = ("stream " if method.client_streaming else "", method.input_type)
            given = ("stream " if method.server_streaming else "", method.output_type)
            yield from self._heading(
                3, f"{self.file.package}.{service.name}.{method.name}", method.name, (*path, 2, index)
            )
            yield f"- Request: {taken[0]}{_reference(taken[1])}\n- Response: {given[0]}{_reference(given[1])}\n"

    def message(self, message: DescriptorProto, path: tuple[int, ...], scope: str) -> Iterator[str]:
        """Yield the section of a message, then those of the messages and enums in it."""
        full = f"{scope}.{message.name}"
        yield from self._heading(2, full, full.removeprefix(f"{self.file.package}."), path)
        entries = {f".{full}.{inner.name}": inner for inner in message.nested_type if inner.options.map_entry}
        shown: set[int] = set()
        for index, field in enumerate(message.field):
            if field.HasField("oneof_index") and not field.proto3_optional:
                if field.oneof_index not in shown:
                    shown.add(field.oneof_index)
                    yield from _definition(
                        f"oneof `{message.oneof_decl[field.oneof_index].name}`",
                        self._comment((*path, 8, field.oneof_index)),
                    )
                suffix = f", in oneof `{message.oneof_decl[field.oneof_index].name}`"
            else:
                suffix = ""
            term = f"`{field.name}` = {field.number}: {_kind(field, entries)}{suffix}"
            yield from _definition(term, self._comment((*path, 2, index)))
        if not message.field:
            yield "This message has no fields.\n"
        for index, inner in enumerate(message.nested_type):
            if not inner.options.map_entry:
                yield from self.message(inner, (*path, 3, index), full)
        for index, enum in enumerate(message.enum_type):
            yield from self.enum(enum, (*path, 4, index), full)

    def enum(self, enum: EnumDescriptorProto, path: tuple[int, ...], scope: str) -> Iterator[str]:
        """Yield the section of an enum."""
        full = f"{scope}.{enum.name}"
        yield from self._heading(2, full, f"Enum {full.removeprefix(f'{self.file.package}.')}", path)
        for index, value in enumerate(enum.value):
            yield from _definition(f"`{value.name}` = {value.number}", self._comment((*path, 2, index)))

    def _heading(self, level: int, full: str, title: str, path: tuple[int, ...]) -> Iterator[str]:
        yield f"({_label(full)})=\n{'#' * level} {title}\n\n{self._comment(path)}\n"

    def _comment(self, path: tuple[int, ...]) -> str:
        lines = [line.strip() for line in self._comments.get(path, "").splitlines()]
        return _escaped("\n".join(line for line in lines if not line.startswith("buf:lint:")).strip())


def _definition(term: str, text: str) -> Iterator[str]:
    indented = "\n".join(f"    {line}" if line else "" for line in text.splitlines()).lstrip()
    yield f"{term}\n:   {indented}\n"


def _kind(field: FieldDescriptorProto, entries: dict[str, DescriptorProto]) -> str:
    if entry := entries.get(field.type_name):
        return f"map of {_type(entry.field[0])} to {_type(entry.field[1])}"
    label = {field.LABEL_REPEATED: "repeated "}.get(field.label, "optional " if field.proto3_optional else "")
    return label + _type(field)


def _type(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _reference(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _reference(type_name: str) -> str:
    full = type_name.removeprefix(".")
    if full.startswith("google."):
        return f"`{full}`"
    return f"[{full.rpartition('.')[2]}](#{_label(full)})"


def _label(full: str) -> str:
    return "proto-" + full.replace(".", "-").lower()


def _escaped(text: str) -> str:
    """Escape characters with a meaning in Markdown, outside backquotes."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if index % 2 else _SPECIAL.sub(r"\\\1", part) for index, part in enumerate(parts))
