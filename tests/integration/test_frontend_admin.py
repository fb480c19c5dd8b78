"""The operators' API in front of engines without a model."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.admin.v1 import messages_pb2 as pb
from penstock.common.v1 import control_pb2, finish_pb2
from penstock_common.errors import InvalidArgument, NotFound, Unavailable
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer, collect, failure, until_states
from tests.fakes.models.small_tokenizers import byte_level

VOCAB = byte_level().get_vocab_size()
KEEP = control_pb2.PAUSE_MODE_KEEP


@pytest.fixture
async def engines() -> AsyncIterator[tuple[FakeEngine, FakeEngine]]:
    async with FakeEngine("a", vocab_size=VOCAB) as a, FakeEngine("b", vocab_size=VOCAB) as b:
        yield a, b


@pytest.fixture
async def admin(engines: tuple[FakeEngine, FakeEngine], model: Path) -> AsyncIterator[Any]:
    """Yield the stub of the operators' API, for a frontend in front of both engines."""
    async with FrontendServer(model, engines=[engine.address for engine in engines]) as frontend:
        await until_states(frontend, dict.fromkeys("ab", control_pb2.ENGINE_STATE_SERVING))
        yield frontend.admin


@pytest.mark.parametrize(
    ("method", "fields", "utility", "arguments"),
    [
        ("Pause", {"mode": control_pb2.PAUSE_MODE_ABORT, "clear_cache": True}, "pause", ["abort", True]),
        ("Pause", {"mode": control_pb2.PAUSE_MODE_WAIT}, "pause", ["wait", False]),
        ("Pause", {"mode": KEEP}, "pause", ["keep", False]),
        ("Resume", {}, "resume", []),
        ("Sleep", {"level": 2, "mode": KEEP}, "sleep", [2, "keep"]),
        ("Sleep", {}, "sleep", [0, "abort"]),
        ("WakeUp", {"tags": ["kv_cache", "weights"]}, "wake_up", [["kv_cache", "weights"]]),
        ("WakeUp", {}, "wake_up", [[]]),
        ("IsSleeping", {}, "is_sleeping", []),
        ("ResetPrefixCache", {"preempt_running": True}, "reset_prefix_cache", [True]),
        ("StartProfile", {}, "start_profile", []),
        ("StopProfile", {}, "stop_profile", []),
        ("GetEngineInfo", {}, "engine_info", []),
        ("CollectiveRpc", {"method": "echo"}, "collective_rpc", ["echo", []]),
        (
            "CollectiveRpc",
            {"method": "echo", "arguments": msgspec.msgpack.encode([1, "x"])},
            "collective_rpc",
            ["echo", [1, "x"]],
        ),
    ],
)
async def test_a_call_reaches_every_engine_with_its_arguments(
    admin: Any,
    engines: tuple[FakeEngine, FakeEngine],
    method: str,
    fields: dict[str, Any],
    utility: str,
    arguments: list[Any],
) -> None:
    await getattr(admin, method)(getattr(pb, f"{method}Request")(**fields))
    assert [engine.utility_calls for engine in engines] == [[(utility, arguments)]] * 2


async def test_sleeping_engines_are_named(admin: Any, engines: tuple[FakeEngine, FakeEngine]) -> None:
    engines[1].utilities["is_sleeping"] = True
    assert dict((await admin.IsSleeping(pb.IsSleepingRequest())).engines) == {"a": False, "b": True}


async def test_engines_describe_themselves_as_json(admin: Any, engines: tuple[FakeEngine, FakeEngine]) -> None:
    engines[1].utilities["engine_info"] = {"state": "paused", "limits": {"max_num_seqs": 4}}
    infos = (await admin.GetEngineInfo(pb.GetEngineInfoRequest())).engines
    assert json.loads(infos["a"]) == {"state": "serving", "num_kv_blocks": 1024}
    assert json.loads(infos["b"]) == {"state": "paused", "limits": {"max_num_seqs": 4}}


async def test_only_caches_that_were_reset_count(admin: Any, engines: tuple[FakeEngine, FakeEngine]) -> None:
    assert (await admin.ResetPrefixCache(pb.ResetPrefixCacheRequest())).num_engines_reset == 2
    engines[0].utilities["reset_prefix_cache"] = False
    assert (await admin.ResetPrefixCache(pb.ResetPrefixCacheRequest())).num_engines_reset == 1


@pytest.mark.parametrize(("what", "method"), [("Multimodal", "reset_mm_cache"), ("Encoder", "reset_encoder_cache")])
async def test_caches_of_media_are_reset_on_every_engine(
    admin: Any, engines: tuple[FakeEngine, FakeEngine], what: str, method: str
) -> None:
    answer = await getattr(admin, f"Reset{what}Cache")(getattr(pb, f"Reset{what}CacheRequest")())
    assert answer.num_engines_reset == 2
    assert [engine.utility_calls for engine in engines] == [[(method, [])]] * 2


async def test_the_paths_of_all_traces_are_returned(admin: Any, engines: tuple[FakeEngine, FakeEngine]) -> None:
    engines[1].utilities["stop_profile"] = ["x", "y"]
    assert list((await admin.StopProfile(pb.StopProfileRequest())).paths) == ["trace.json", "x", "y"]


async def test_every_worker_of_every_engine_answers_a_collective_call(
    admin: Any, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    engines[1].utilities["collective_rpc"] = [{"rank": 0}, None]
    answer = await admin.CollectiveRpc(pb.CollectiveRpcRequest(method="echo"))
    assert [msgspec.msgpack.decode(result) for result in answer.results] == ["of worker 0", {"rank": 0}, None]


@pytest.mark.parametrize(
    ("method", "fields", "field"),
    [
        ("Pause", {}, "mode"),
        ("Pause", {"mode": 9}, "mode"),
        ("Sleep", {"level": 3}, "level"),
        ("Sleep", {"mode": 9}, "mode"),
        ("WakeUp", {"tags": ["weights", "wieghts"]}, "tags[1]"),
        ("CollectiveRpc", {}, "method"),
        ("CollectiveRpc", {"method": "m", "arguments": b"\xc1"}, "arguments"),
        ("CollectiveRpc", {"method": "m", "arguments": msgspec.msgpack.encode({})}, "arguments"),
    ],
)
async def test_a_wrong_field_is_named_and_no_engine_is_asked(
    admin: Any, engines: tuple[FakeEngine, FakeEngine], method: str, fields: dict[str, Any], field: str
) -> None:
    error = await failure(getattr(admin, method)(getattr(pb, f"{method}Request")(**fields)))
    assert isinstance(error, InvalidArgument)
    assert error.field == field
    assert [engine.utility_calls for engine in engines] == [[], []]


async def test_an_error_of_one_engine_fails_the_call_naming_it_after_all_were_asked(
    admin: Any, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    engines[0].utilities["pause"] = finish_pb2.RequestError(
        code="UNAVAILABLE", message="not now", reason="BUSY", retry_after=2.5
    )
    error = await failure(admin.Pause(pb.PauseRequest(mode=KEEP)))
    assert isinstance(error, Unavailable)
    assert (error.message, error.reason, error.retry_after) == ("engine a: not now", "BUSY", 2.5)
    assert [len(engine.utility_calls) for engine in engines] == [1, 1]


async def test_a_method_that_engines_do_not_have_is_not_found(
    admin: Any, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    for engine in engines:
        engine.utilities.clear()
    error = await failure(admin.Resume(pb.ResumeRequest()))
    assert isinstance(error, NotFound)
    assert error.message == "engine a: no utility 'resume'"


async def test_without_engines_a_call_is_unavailable(model: Path) -> None:
    async with FrontendServer(model, engines=["127.0.0.1:1"]) as frontend:
        error = await failure(frontend.admin.Resume(pb.ResumeRequest()))
    assert isinstance(error, Unavailable)
    assert error.message == "no engine is connected"


async def test_a_drain_tells_how_far_it_is_until_the_engine_is_empty(
    admin: Any, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    a, b = engines
    left = iter([3, 3, 1, 0])
    a.on_utility = lambda method: a.utilities.update(drain=next(left))
    progress = await collect(admin.Drain(pb.DrainRequest(engine_id="a", timeout_seconds=7.5)))
    assert [(m.engine_id, m.num_unfinished_reqs, m.done) for m in progress] == [
        ("a", 3, False),
        ("a", 1, False),
        ("a", 0, True),
    ]
    assert a.utility_calls == [("drain", [7.5])] * 4
    assert b.utility_calls == []


async def test_a_drain_waits_for_blocks_that_are_kept_for_others_and_tells_how_many_bytes(model: Path) -> None:
    left = iter([(2, 0), (0, 700), (0, 300), (0, 300), (0, 0)])
    async with FakeEngine("a", vocab_size=VOCAB) as engine:
        engine.ready.kv_address = "127.0.0.1:9"

        def answer(method: str) -> None:
            if method == "drain":
                requests, kept = next(left)
                engine.utilities.update(drain=requests, engine_info={"kv_transfer": {"leased_bytes": kept}})

        engine.on_utility = answer
        async with FrontendServer(model, engines=[engine.address]) as frontend:
            await until_states(frontend, {"a": control_pb2.ENGINE_STATE_SERVING})
            progress = await collect(frontend.admin.Drain(pb.DrainRequest(engine_id="a", timeout_seconds=7.5)))
    told = [(m.num_unfinished_reqs, m.num_bytes_left, m.done) for m in progress]
    assert told == [(2, 0, False), (0, 700, False), (0, 300, False), (0, 0, True)]


async def test_an_engine_that_leaves_while_it_drains_is_drained(
    admin: Any, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    a, _ = engines
    a.utilities["drain"] = 2
    progress = aiter(admin.Drain(pb.DrainRequest(engine_id="a", timeout_seconds=60)))
    assert (await anext(progress)).num_unfinished_reqs == 2
    await a.kill()
    assert [message.done async for message in progress] == [True]


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"engine_id": "c"}, NotFound, "engine_id"),
        ({}, NotFound, "engine_id"),
        ({"engine_id": "a", "timeout_seconds": -1}, InvalidArgument, "timeout_seconds"),
        ({"engine_id": "a", "timeout_seconds": float("nan")}, InvalidArgument, "timeout_seconds"),
        ({"engine_id": "a", "timeout_seconds": 1e9}, InvalidArgument, "timeout_seconds"),
    ],
)
async def test_a_drain_of_nothing_or_for_ever_is_refused(
    admin: Any, engines: tuple[FakeEngine, FakeEngine], fields: dict[str, Any], error: type, field: str
) -> None:
    failed = await failure(admin.Drain(pb.DrainRequest(**fields)))
    assert isinstance(failed, error)
    assert failed.field == field
    assert engines[0].utility_calls == []
