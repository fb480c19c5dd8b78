"""Rules for every .proto file, checked on descriptors and sources. ``make lint`` also runs buf."""

import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileOptions

PROTOS = Path(__file__).resolve().parents[2] / "protos"
OF_OTHERS = PROTOS / "penstock" / "keda"
"""Unchanged contracts of other projects."""
FILES = sorted(
    path.relative_to(PROTOS) for path in (PROTOS / "penstock").rglob("*.proto") if OF_OTHERS not in path.parents
)
PACKAGES = {"common", "enginecore", "coordinator", "inference", "kvtransfer", "admin", "worker"}


def descriptor(path: Path) -> FileDescriptor:
    module = importlib.import_module(".".join(path.with_suffix("").parts) + "_pb2")
    found: FileDescriptor = module.DESCRIPTOR
    return found


def messages(container: FileDescriptor | Descriptor) -> Iterator[Descriptor]:
    nested = (
        container.message_types_by_name if isinstance(container, FileDescriptor) else container.nested_types_by_name
    )
    for message in nested.values():
        yield message
        yield from messages(message)


def enums(file: FileDescriptor) -> Iterator[EnumDescriptor]:
    yield from file.enum_types_by_name.values()
    for message in messages(file):
        yield from message.enum_types


def test_every_package_of_the_design_is_there() -> None:
    assert {path.parts[1] for path in FILES} == PACKAGES


@pytest.mark.parametrize("path", FILES, ids=str)
def test_package_follows_the_directory_and_ends_in_v1(path: Path) -> None:
    package = descriptor(path).package
    assert package == ".".join(path.parent.parts)
    assert package.endswith(".v1")


@pytest.mark.parametrize("path", FILES, ids=str)
def test_code_of_every_language_has_its_package(path: Path) -> None:
    _, area, version = path.parent.parts
    title = {"enginecore": "EngineCore", "kvtransfer": "KvTransfer"}.get(area, area.capitalize())
    file = FileDescriptorProto.FromString(descriptor(path).serialized_pb)
    expected = FileOptions(
        csharp_namespace=f"Penstock.{title}.{version.upper()}",
        go_package=f"penstock.io/protos/{area}/{version};{area}{version}",
        java_multiple_files=True,
        java_outer_classname="".join(part.capitalize() for part in path.stem.split("_")) + "Proto",
        java_package=f"io.penstock.{area}.{version}",
        objc_class_prefix=f"PST{title}",
    )
    assert file.options == expected


@pytest.mark.parametrize("path", FILES, ids=str)
def test_enum_values_carry_the_enums_name_and_zero_is_unspecified(path: Path) -> None:
    for enum in enums(descriptor(path)):
        prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper()
        assert enum.values_by_number[0].name == f"{prefix}_UNSPECIFIED"
        assert all(value.name.startswith(prefix + "_") for value in enum.values)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_message_field_enum_value_and_rpc_has_a_comment(path: Path) -> None:
    lines = (PROTOS / path).read_text().splitlines()
    declaration = re.compile(
        r"^\s*(message|enum|service|rpc|oneof)\s+\w+"
        r"|^\s*(optional\s+|repeated\s+)?(map<.*>|[\w.]+)\s+\w+\s*=\s*\d+;"
        r"|^\s*[A-Z0-9_]+\s*=\s*\d+;"
    )
    for number, line in enumerate(lines):
        if declaration.match(line):
            assert lines[number - 1].lstrip().startswith("//"), f"{path}:{number + 1} has no comment: {line.strip()}"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_field_is_named_in_the_services(path: Path) -> None:
    named = words_of_the_services()
    unused = [
        field.full_name
        for message in messages(descriptor(path))
        if not message.GetOptions().map_entry
        for field in message.fields
        if field.name not in named
    ]
    assert not unused, f"no service reads or writes {unused}: remove them, and reserve their names and numbers"


@cache
def words_of_the_services() -> frozenset[str]:
    services = PROTOS.parent / "services"
    return frozenset(word for path in services.rglob("*.py") for word in re.findall(r"\w+", path.read_text()))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_repeated_numbers_are_packed(path: Path) -> None:
    for message in messages(descriptor(path)):
        for field in message.fields:
            if field.is_repeated and field.type not in (field.TYPE_STRING, field.TYPE_BYTES, field.TYPE_MESSAGE):
                assert field.is_packed, field.full_name


@pytest.mark.parametrize(
    ("module", "types"),
    [
        ("outputs:FinishReason", "finish_pb2:FinishReason"),
        ("outputs:EventType", "events_pb2:EngineCoreEventType"),
        ("sampling:OutputKind", "sampling_pb2:OutputKind"),
        ("sampling:JsonWhitespace", "structured_output_pb2:JsonWhitespace"),
        ("cluster:EngineState", "control_pb2:EngineState"),
        ("kv_transfer:EngineRole", "kv_pb2:EngineRole"),
        ("kv_transfer:KvMedium", "kv_pb2:KvMedium"),
        ("request:PoolingTask", "pooling_pb2:PoolingTask"),
    ],
)
def test_domain_enums_have_the_values_of_the_contract(module: str, types: str) -> None:
    domain_module, domain_name = module.split(":")
    wire_module, wire_name = types.split(":")
    domain = getattr(importlib.import_module(f"penstock_common.types.{domain_module}"), domain_name)
    wire = getattr(importlib.import_module(f"penstock.common.v1.{wire_module}"), wire_name)
    prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", wire_name).upper() + "_"
    on_the_wire = {name.removeprefix(prefix): number for name, number in wire.items() if number}
    assert {member.name: member.value for member in domain} == on_the_wire


def test_the_domains_sampling_params_have_the_fields_of_the_contract() -> None:
    from penstock.common.v1 import sampling_pb2
    from penstock_common.types.sampling import SamplingParams

    assert set(SamplingParams.__struct_fields__) == {f.name for f in sampling_pb2.SamplingParams.DESCRIPTOR.fields}
