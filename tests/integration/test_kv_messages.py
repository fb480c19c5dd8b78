"""Messages between frontends and engines about moved requests: writers and readers agree."""

import msgspec

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.rpc.by_field import to_message
from penstock_common.types.kv_transfer import EngineRole, KvParams, KvSource
from penstock_common.types.outputs import EngineCoreOutput, EngineCoreOutputs, EngineReady, FinishReason, PrefillStats
from penstock_common.types.request import RequestContext
from penstock_enginecore.rpc import convert
from penstock_frontend.rpc import session_messages
from tests.fakes.engines.engine_harness import make_request

SOURCE = KvSource(
    engine_id="a", incarnation="1", address="h:50054", lease_id=b"l" * 16, num_tokens=1024, fingerprint=b"f" * 16
)


def test_a_request_takes_its_source_and_its_legs_to_the_engine():
    plain = make_request()
    for request in (
        plain,
        msgspec.structs.replace(plain, kv_source=SOURCE),
        msgspec.structs.replace(plain, handoff_after_tokens=1, context=RequestContext(kv=KvParams(lease=True))),
    ):
        wire = session_messages.add_request(request).SerializeToString()
        assert convert.request_from_proto(pb.SessionRequest.FromString(wire).add) == request


def test_outputs_say_who_keeps_the_blocks_and_where_tokens_of_the_prompt_came_from():
    handed = EngineCoreOutput(
        request_id="r",
        attempt=2,
        offset=3,
        new_token_ids=[7],
        finish_reason=FinishReason.HANDOFF,
        kv_source=SOURCE,
        prefill_stats=PrefillStats(
            num_prompt_tokens=9, num_cached_tokens=8, num_host_tokens=4, num_disk_tokens=2, num_peer_tokens=1
        ),
    )
    refused = EngineCoreOutput(request_id="s", finish_reason=FinishReason.HANDOFF)
    outputs = EngineCoreOutputs(outputs=[handed, refused], finished_requests=["r", "s"])
    wire = convert.outputs_to_proto(outputs).SerializeToString()
    assert session_messages.engine_core_outputs(pb.EngineCoreOutputs.FromString(wire)) == outputs


def test_an_engine_says_what_it_is_preferred_for_and_whether_its_blocks_move():
    ready = EngineReady(
        engine_id="a",
        incarnation="1",
        model="m",
        max_model_len=128,
        num_kv_blocks=8,
        block_size=16,
        vocab_size=256,
        hidden_size=0,
        embedding_size=0,
        role=EngineRole.DECODE,
        kv_address="h:50054",
        kv_fingerprint=b"f" * 16,
    )
    wire = to_message(ready, pb.Ready, protocol_revision=1).SerializeToString()
    assert session_messages.engine_ready(pb.Ready.FromString(wire)) == ready
    earlier = pb.Ready(engine_id="a", incarnation="1", model="m")
    assert session_messages.engine_ready(earlier).role is EngineRole.BOTH
