"""KV transfer parameters of gateways: parsed, refused by name, and returned."""

from typing import Any

import msgspec
import pytest

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.cluster import EngineStatus
from penstock_common.types.kv_transfer import MAX_PARAMS_BYTES, KvParams, KvSource
from penstock_frontend.config import DisaggregationConfig
from penstock_frontend.dispatch.kv_gateway import KvGateway, params_of

SOURCE = KvSource(
    engine_id="a", incarnation="1", address="h:50054", lease_id=b"l" * 16, num_tokens=1024, fingerprint=b"f" * 16
)


class View:
    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses

    def cluster(self) -> list[EngineStatus]:
        return [EngineStatus(engine_id=a, incarnation="1", address="h:1", kv_address=a) for a in self.addresses]


def gateway(*addresses: str, **config: Any) -> KvGateway:
    return KvGateway(DisaggregationConfig(**{"gateway": True} | config), View(*addresses))  # type: ignore[arg-type]


def read(given: Any, *, n: int = 1, gateway: KvGateway = gateway("h:50054")) -> KvParams:  # noqa: B008
    return gateway.read(given, n=n, field="kv_transfer_params")


@pytest.mark.parametrize("given", [None, {}, {"do_remote_decode": False}, {"do_remote_prefill": None, "tp_size": 1}])
def test_empty_parameters_request_nothing(given: Any) -> None:
    assert read(given) == KvParams()


def test_a_first_request_has_its_blocks_kept_and_a_second_one_gets_them() -> None:
    first = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
    assert read(first) == KvParams(lease=True)
    answer = msgspec.json.decode(msgspec.json.encode(params_of(SOURCE)))
    assert (answer["do_remote_prefill"], answer["do_remote_decode"]) == (True, False)
    assert (answer["remote_host"], answer["remote_port"]) == ("h", 50054)
    assert read(answer) == KvParams(source=SOURCE)


def test_a_source_with_an_ipv6_address_comes_back() -> None:
    source = msgspec.structs.replace(SOURCE, address="[::1]:50054")
    assert read(params_of(source), gateway=gateway("[::1]:50054")).source == source


@pytest.mark.parametrize(
    ("allowed", "asked"), [((), False), (("h",), True), (("h:50054",), True), (("h:50055", "i"), False)]
)
def test_only_engines_of_the_view_and_those_allowed_are_asked(allowed: tuple[str, ...], asked: bool) -> None:
    found = read(params_of(SOURCE), gateway=gateway("other:1", allowed_addresses=allowed))
    assert found == KvParams(source=SOURCE if asked else None)


def test_another_connectors_parameters_are_computed() -> None:
    assert read({"do_remote_prefill": True, "remote_block_ids": [1, 2], "remote_host": "h"}) == KvParams()


@pytest.mark.parametrize("given", [{"do_remote_decode": True}, {"do_remote_decode": False}, "text"])
def test_without_the_setting_they_are_refused_by_name(given: Any) -> None:
    with pytest.raises(Unimplemented, match="kv_transfer_params is not supported"):
        read(given, gateway=gateway(gateway=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"penstock": {"lease_id": "zz"}}, "copy it unchanged from the first request's response"),
        ({"penstock": "x"}, "copy it unchanged from the first request's response"),
        ({"remote_port": "x"}, "copy it unchanged from the first request's response"),
        ({"remote_port": 70_000}, "copy it unchanged from the first request's response"),
        ({"remote_engine_id": ""}, "is not valid: .* length >= 1 - at `\\$.remote_engine_id`"),
        ({"remote_host": "h" * 300}, "is not valid: .* length <= 250 - at `\\$.remote_host`"),
        (
            {"penstock": params_of(SOURCE)["penstock"] | {"num_tokens": 10**40}},
            "is not valid: .* at `\\$.num_tokens`",
        ),
        (
            {"penstock": params_of(SOURCE)["penstock"] | {"num_tokens": -1}},
            "is not valid: .* at `\\$.num_tokens`",
        ),
        ({"remote_host": "a:b"}, "copy it unchanged from the first request's response"),
        ({"do_remote_prefill": 1}, "do_remote_prefill is 1; it must be true or false"),
        ({"do_remote_decode": True}, "sets both do_remote_decode and do_remote_prefill"),
        ({"remote_block_ids": ["x" * MAX_PARAMS_BYTES]}, "bytes; it must have at most 16384"),
    ],
)
def test_what_no_answer_had_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as refused:
        read(params_of(SOURCE) | change)
    assert refused.value.field.startswith("kv_transfer_params")


@pytest.mark.parametrize("given", [[1], [], "", "text", 0, 7, False, True])
def test_values_that_are_no_object_are_refused(given: Any) -> None:
    with pytest.raises(InvalidArgument, match="kv_transfer_params is not a JSON object"):
        read(given)


def test_a_first_request_has_one_sequence() -> None:
    with pytest.raises(InvalidArgument, match="n must be 1") as refused:
        read({"do_remote_decode": True}, n=2)
    assert refused.value.field == "n"


def test_parameters_as_text_are_the_same() -> None:
    text = msgspec.json.encode(params_of(SOURCE)).decode()
    assert gateway("h:50054").read_json(text, n=1, field="f") == KvParams(source=SOURCE)
    assert gateway().read_json("", n=1, field="f") == KvParams()
    for wrong, message in (
        ("{", "f is not valid JSON"),
        ("[1]", "f is not a JSON object"),
        ("x" * (MAX_PARAMS_BYTES + 1), "at most 16384"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            gateway().read_json(wrong, n=1, field="f")
