"""The list of refused fields equals the table in docs/reference/request-fields.md, and fits the structs of request
bodies.
"""

import re

import msgspec

from penstock.common.v1.pooling_pb2 import PoolingParams
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.common.v1.structured_output_pb2 import StructuredOutput
from penstock.inference.v1 import messages_pb2 as pb
from penstock_frontend.api.ignored_fields import ignored_in
from penstock_frontend.api.unsupported_fields import (
    CLASSIFY,
    EMBEDDINGS,
    GENERATING,
    ROUTES,
    SCORES,
    UNSUPPORTED,
    unsupported_in,
)
from tests.contract.test_ignored_fields import SOURCES, body_structs
from tests.documents.field_tables import REFERENCE, updated


def test_the_page_is_up_to_date() -> None:
    assert (REFERENCE / "request-fields.md").read_text(encoding="utf-8") == updated("request-fields.md"), (
        "run make settings"
    )


def test_each_field_of_a_struct_has_one_remedy() -> None:
    for struct in ROUTES:
        names = [name for field in UNSUPPORTED if struct in field.structs for name in field.names]
        assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]


def test_no_field_is_refused_and_ignored() -> None:
    for struct in ROUTES:
        assert not unsupported_in(struct).keys() & ignored_in(struct)


def test_a_refused_field_of_a_struct_is_refused_where_the_struct_is_checked() -> None:
    """Checks structs that define a refused field. For such structs, the route must refuse the field explicitly."""
    sources = "".join(path.read_text() for path in (SOURCES / "api").rglob("*.py"))
    asked = {
        name
        for call in re.findall(r"refuse_fields\(\s*body,([^)]*)\)", sources)
        for name in re.findall(r'"(\w+)"', call)
    }
    for struct in ROUTES:
        declared = {field.encode_name for field in msgspec.structs.fields(body_structs()[struct])}
        assert declared & unsupported_in(struct).keys() <= asked


def test_the_remedy_of_a_field_is_a_field_of_the_same_body() -> None:
    for struct in ROUTES:
        served = {field.encode_name for field in msgspec.structs.fields(body_structs()[struct])}
        for name, field in unsupported_in(struct).items():
            if re.fullmatch(r"[a-z_]+(\.\w+)?", field.instead) and struct != "MessageBody":
                first = field.instead.partition(".")[0]
                assert first in served - unsupported_in(struct).keys(), (struct, name, field.instead)


GRPC_MESSAGES = {
    **dict.fromkeys(GENERATING, (pb.GenerateRequest, pb.ChatRequest, SamplingParams, StructuredOutput)),
    **dict.fromkeys(EMBEDDINGS, (pb.EmbedRequest, PoolingParams)),
    **dict.fromkeys(CLASSIFY, (pb.ClassifyRequest, PoolingParams)),
    **dict.fromkeys(SCORES, (pb.ScoreRequest,)),
    "MessageBody": (pb.ChatMessage,),
}
"""Messages of the gRPC API whose fields clients may send over HTTP, by struct of the HTTP body."""
MAY_BE_UNKNOWN = {
    "skip_reading_prefix_cache": "changes no output",
    "dimensions": "the gRPC API has the field only for embeddings",
    "normalize": "the gRPC API has the field only for embeddings",
    "query": "the HTTP body without queries is refused",
}


def test_no_field_of_the_grpc_api_is_unknown_over_http() -> None:
    for struct, messages in GRPC_MESSAGES.items():
        known = {field.encode_name for field in msgspec.structs.fields(body_structs()[struct])}
        known |= ignored_in(struct) | unsupported_in(struct).keys() | MAY_BE_UNKNOWN.keys()
        names = {field.name for message in messages for field in message.DESCRIPTOR.fields}
        assert names <= known, (struct, names - known)
