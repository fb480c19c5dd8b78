"""Names of LoRA adapters in front of engines without a model: the adapter in engine requests, and changes by operators."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.common.v1 import finish_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from penstock_frontend.config import LoraConfig
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.engines.lora_engine import LoraEngine, digest_of
from tests.fakes.frontends.frontend_server import FrontendServer, eventually, failure
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.patience import PATIENCE

VOCAB = byte_level().get_vocab_size()
CONFIG = LoraConfig(adapters={"pirate": "/a/pirate", "poet": "/a/poet"}, roots=("/a",), max_registered=4)


class Rig:
    def __init__(self, frontend: FrontendServer, engines: list[LoraEngine], disk: dict[str, str]) -> None:
        self.frontend, self.engines, self.disk = frontend, engines, disk
        self.admin = frontend.admin

    async def load(self, name: str = "new", path: str = "/a/new", **fields: Any) -> admin_pb.LoraInfo:
        return (await self.admin.LoadLora(admin_pb.LoadLoraRequest(name=name, path=path, **fields))).lora

    async def names(self) -> list[str]:
        return list((await self.admin.ListLoras(admin_pb.ListLorasRequest())).names)

    async def applied(self, **fields: Any) -> Any:
        """Send a request. Returns the adapter that the engine got: name, path and content. None means no adapter."""
        before = {engine: len(engine.requests) for engine in self.engines}
        await self.frontend.outputs(max_tokens=1, **fields)
        ((lora, given),) = [(r.lora, r.HasField("lora")) for e in self.engines for r in e.requests[before[e] :]]
        content = {digest_of(content): content for content in self.disk.values()}
        return (lora.name, lora.path, content.get(lora.digest, lora.digest)) if given else None

    @property
    def held(self) -> list[set[str]]:
        """Return, for each engine, the contents of its loaded adapters."""
        content = {digest_of(content): content for content in ["ahoy", "odes", "news", "news 2"]}
        return [{content[digest] for digest in engine.held} for engine in self.engines]


@pytest.fixture
async def rig(model: Path) -> AsyncIterator[Rig]:
    disk = {"/a/pirate": "ahoy", "/a/poet": "odes", "/a/new": "news"}
    async with (
        LoraEngine("a", disk, vocab_size=VOCAB) as a,
        LoraEngine("b", disk, vocab_size=VOCAB) as b,
        FrontendServer(model, engines=[a.address, b.address], lora=CONFIG) as frontend,
    ):
        await frontend.until_engines(2)
        yield Rig(frontend, [a, b], disk)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, ""),
        ({"model": "model"}, ""),
        ({"lora": "model"}, ""),
        ({"model": "model", "lora": "model"}, ""),
        ({"lora": "pirate"}, "pirate"),
        ({"model": "pirate"}, "pirate"),
        ({"model": "model", "lora": "pirate"}, "pirate"),
        ({"model": "pirate", "lora": "pirate"}, "pirate"),
        ({"model": "poet"}, "poet"),
    ],
)
async def test_engines_are_told_which_adapter_a_request_names(rig: Rig, fields: dict[str, str], name: str) -> None:
    expected = (name, f"/a/{name}", rig.disk[f"/a/{name}"]) if name else None
    assert await rig.applied(**fields) == expected
    assert await rig.applied(**fields) == expected


async def test_two_names_are_refused(rig: Rig) -> None:
    error = await failure(rig.frontend.generate(model="pirate", lora="poet"))
    assert isinstance(error, InvalidArgument)
    assert error.message == "lora is 'poet' and model is 'pirate': they name two different adapters"
    assert error.field == "lora"


async def test_an_unknown_name_is_answered_with_the_nearest_one(rig: Rig) -> None:
    error = await failure(rig.frontend.generate(lora="priate"))
    assert isinstance(error, NotFound)
    assert error.message == "lora is 'priate', which is not a LoRA adapter; there are 2; did you mean 'pirate'?"
    error = await failure(rig.frontend.generate(model="poeta"))
    assert isinstance(error, NotFound)
    assert error.message == "model is 'poeta'; known: model and 2 LoRA adapters; did you mean 'poet'?"


async def test_all_calls_take_adapters(rig: Rig) -> None:
    (engine,) = rig.engines[:1]
    for each in rig.engines:
        each.ready.capabilities.extend(["embed", "classify"])
    stub = rig.frontend.stub
    for call, request in (
        (stub.Embed, pb.EmbedRequest(inputs=[{"text": "a"}], lora="wrong")),
        (stub.Classify, pb.ClassifyRequest(inputs=[{"text": "a"}], lora="wrong")),
        (stub.Score, pb.ScoreRequest(query={"text": "a"}, documents=[{"text": "b"}], lora="wrong")),
        (stub.Chat, pb.ChatRequest(messages=[{"role": "user", "content": "a"}], lora="wrong")),
    ):
        error = await failure(call(request))
        assert (type(error), error.field) == (NotFound, "lora"), call
    assert not engine.requests


async def test_the_content_is_asked_for_once_of_one_engine(rig: Rig) -> None:
    calls = [rig.frontend.outputs(lora="pirate", max_tokens=1) for _ in range(4)]
    for call in calls:
        await call
    asked = [call for engine in rig.engines for call in engine.utility_calls]
    assert asked == [("add_lora", ["pirate", "/a/pirate", b"", False])]


async def test_an_engine_that_cannot_read_an_adapter_leaves_it_to_another(rig: Rig) -> None:
    missing = finish_pb2.RequestError(code="FAILED_PRECONDITION", message="no such file", reason="LORA_UNAVAILABLE")
    for engine in rig.engines:
        engine.failing = missing
    error = await failure(rig.frontend.generate(lora="pirate"))
    assert isinstance(error, FailedPrecondition)
    assert error.message.startswith("engine ")
    assert error.message.endswith(": no such file")
    asked = {engine.ready.engine_id for engine in rig.engines if engine.utility_calls}
    assert asked == {"a", "b"}
    router = rig.frontend.frontend._models[0].assembly.engines._dispatch._router
    home, *_ = router.loras.in_order([engine.address for engine in rig.engines], digest_of("ahoy"))
    broken, whole = sorted(rig.engines, key=lambda engine: engine.address != home)
    whole.failing = None
    for _ in range(4):
        await rig.frontend.outputs(lora="pirate", max_tokens=1)
    assert [request.lora.digest for request in whole.requests] == [digest_of("ahoy")] * 4
    assert len(broken.requests) == 1, "it was tried there once"


async def test_changed_content_is_read_anew(rig: Rig) -> None:
    assert await rig.applied(lora="poet") == ("poet", "/a/poet", "odes")
    for engine in rig.engines:
        engine.held.clear()
    rig.disk["/a/poet"] = "news 2"
    error = await failure(rig.frontend.generate(lora="poet"))
    assert (type(error), error.reason) == (FailedPrecondition, "LORA_CHANGED")
    assert await rig.applied(lora="poet") == ("poet", "/a/poet", "news 2")


async def test_a_request_that_moves_takes_its_adapter_along(model: Path) -> None:
    disk = {"/a/pirate": "ahoy", "/a/poet": "odes"}
    async with (
        LoraEngine("a", disk, vocab_size=VOCAB, manual=True) as a,
        LoraEngine("b", disk, vocab_size=VOCAB, manual=True) as b,
        FrontendServer(model, engines=[a.address, b.address], lora=CONFIG) as frontend,
    ):
        await frontend.until_engines(2)
        call = frontend.generate(lora="pirate", max_tokens=3, seed=1)
        outputs = aiter(call)
        await eventually(lambda: a.running or b.running)
        first, second = (a, b) if a.running else (b, a)
        first.step()
        await anext(outputs)
        first.break_streams()
        await second.until(lambda e: e.running)
        second.step()
        second.step()
        rest = [output async for output in outputs]
        assert rest[-1].finish_reason == finish_pb2.FINISH_REASON_LENGTH
        moved = second.requests[0]
        assert (moved.attempt, moved.lora) == (1, first.requests[0].lora)
        assert moved.lora.digest == digest_of("ahoy")


async def test_requests_with_adapters_go_to_engines_that_apply_them(model: Path) -> None:
    disk = {"/a/pirate": "ahoy", "/a/poet": "odes"}
    async with (
        FakeEngine("a", vocab_size=VOCAB) as plain,
        LoraEngine("b", disk, vocab_size=VOCAB) as engine,
        FrontendServer(model, engines=[plain.address, engine.address], lora=CONFIG) as frontend,
    ):
        await frontend.until_engines(2)
        for _ in range(6):
            await frontend.outputs(lora="pirate", max_tokens=1)
        assert (len(plain.requests), len(engine.requests)) == (0, 6)


async def test_engines_that_apply_none_are_told_of_none(model: Path) -> None:
    async with (
        FakeEngine(vocab_size=VOCAB) as engine,
        FrontendServer(model, engines=[engine.address], lora=CONFIG) as frontend,
    ):
        await frontend.until_engines(1)
        for fields in ({"lora": "pirate"}, {"model": "pirate"}):
            error = await failure(frontend.generate(**fields))
            assert (type(error), error.field) == (Unimplemented, next(iter(fields)))
            assert "set lora.max_loras of the engines to at least 1" in error.message
        error = await failure(frontend.admin.LoadLora(admin_pb.LoadLoraRequest(name="n", path="/a/n")))
        assert isinstance(error, Unimplemented)
        assert not engine.requests
        assert not engine.utility_calls


async def test_a_loaded_adapter_can_be_named_until_it_is_unloaded(rig: Rig) -> None:
    loaded = await rig.load(pinned=True)
    assert loaded == admin_pb.LoraInfo(
        name="new",
        path="/a/new",
        digest=digest_of("news"),
        rank=8,
        modules=["q_proj"],
        num_bytes=1024,
        pinned=True,
        source=admin_pb.LORA_SOURCE_RUN_TIME,
        engine_ids=["a", "b"],
    )
    assert rig.held == [{"news"}, {"news"}]
    assert await rig.names() == ["new", "pirate", "poet"]
    assert await rig.applied(model="new") == ("new", "/a/new", "news")
    unloaded = await rig.admin.UnloadLora(admin_pb.UnloadLoraRequest(name="new"))
    assert unloaded.lora.digest == digest_of("news")
    assert rig.held == [set(), set()]
    assert await rig.names() == ["pirate", "poet"]
    assert isinstance(await failure(rig.frontend.generate(lora="new")), NotFound)
    assert isinstance(await failure(rig.admin.UnloadLora(admin_pb.UnloadLoraRequest(name="new"))), NotFound)


async def test_adapters_are_listed_with_who_holds_them(rig: Rig) -> None:
    await rig.applied(lora="pirate")
    holders = [engine.ready.engine_id for engine, held in zip(rig.engines, rig.held, strict=True) if "ahoy" in held]
    pirate, poet = (await rig.admin.ListLoras(admin_pb.ListLorasRequest())).loras
    assert (pirate.name, pirate.digest, list(pirate.engine_ids)) == ("pirate", digest_of("ahoy"), holders)
    assert (pirate.source, pirate.rank) == (admin_pb.LORA_SOURCE_CONFIG, 8)
    assert poet == admin_pb.LoraInfo(name="poet", path="/a/poet", source=admin_pb.LORA_SOURCE_CONFIG)


async def test_other_content_takes_a_name_only_when_told_to(rig: Rig) -> None:
    await rig.load()
    rig.disk["/a/new"] = "news 2"
    error = await failure(rig.load())
    assert (type(error), error.reason) == (AlreadyExists, "LORA_NAME_TAKEN")
    assert rig.held == [{"news"}, {"news"}]
    await rig.load(load_inplace=True)
    assert rig.held == [{"news", "news 2"}] * 2, "other frontends may not have heard of it"
    await eventually(lambda: rig.held == [{"news 2"}, {"news 2"}])
    assert await rig.applied(lora="new") == ("new", "/a/new", "news 2")
    await rig.load()  # loads the same adapter again


async def test_content_stays_while_another_name_means_it(rig: Rig) -> None:
    await rig.load("one")
    await rig.load("two")
    await rig.admin.UnloadLora(admin_pb.UnloadLoraRequest(name="one"))
    assert rig.held == [{"news"}, {"news"}]


async def test_a_load_fails_as_a_whole(rig: Rig) -> None:
    rig.engines[1].failing = finish_pb2.RequestError(
        code="INVALID_ARGUMENT", message="no adapter", field="lora", reason="LORA_X"
    )
    error = await failure(rig.load())
    assert (type(error), error.message, error.reason) == (InvalidArgument, "engine b: no adapter", "LORA_X")
    assert error.field == "", "the engine's is a field of requests"
    assert rig.held == [set(), set()]
    assert await rig.names() == ["pirate", "poet"]


async def test_engines_that_find_different_adapters_at_a_path_load_none(rig: Rig) -> None:
    rig.engines[1].disk = {"/a/new": "news 2"}
    error = await failure(rig.load())
    assert (type(error), error.reason, error.field) == (FailedPrecondition, "LORA_DIFFERS", "path")
    assert rig.held == [set(), set()]


@pytest.mark.parametrize(
    ("fields", "kind", "field"),
    [
        ({"name": ""}, InvalidArgument, "name"),
        ({"name": "x" * 257}, InvalidArgument, "name"),
        ({"name": "a\nb"}, InvalidArgument, "name"),
        ({"name": " a"}, InvalidArgument, "name"),
        ({"name": "model"}, InvalidArgument, "name"),
        ({"name": "pirate"}, AlreadyExists, "name"),
        ({"path": ""}, InvalidArgument, "path"),
        ({"path": "/a/" + "x" * 4096}, InvalidArgument, "path"),
        ({"path": "/b/new"}, PermissionDenied, "path"),
        ({"path": "/a/../b/new"}, PermissionDenied, "path"),
        ({"path": "/ab/new"}, PermissionDenied, "path"),
        ({"path": "/a"}, PermissionDenied, "path"),
        ({"path": "a/new"}, PermissionDenied, "path"),
    ],
)
async def test_loads_that_are_not_allowed_are_refused(rig: Rig, fields: dict[str, str], kind: type, field: str) -> None:
    error = await failure(rig.load(**fields))
    assert (type(error), error.field) == (kind, field)
    assert not any(engine.utility_calls for engine in rig.engines)


async def test_a_root_is_no_adapters_directory(rig: Rig) -> None:
    error = await failure(rig.load(path="/a"))
    assert error.message == (
        "path is '/a'; it must be an absolute path below one of lora.roots, and not a root itself: /a"
    )


async def test_names_are_bounded(rig: Rig) -> None:
    await rig.load("one")
    await rig.load("two")
    error = await failure(rig.load("three"))
    assert isinstance(error, ResourceExhausted)
    assert error.message == "4 LoRA adapters have names; the limit lora.max_registered is 4"
    await rig.load("two", load_inplace=True)


async def test_configured_adapters_cannot_be_unloaded(rig: Rig) -> None:
    error = await failure(rig.admin.UnloadLora(admin_pb.UnloadLoraRequest(name="poet")))
    assert isinstance(error, FailedPrecondition)
    assert error.message == "name is 'poet', which the configuration defines; remove the adapter there"


@pytest.mark.parametrize("name", ["poet", "new"])
async def test_pinning_has_every_engine_hold_an_adapter(rig: Rig, name: str) -> None:
    await rig.load()
    answer = await rig.admin.PinLora(admin_pb.PinLoraRequest(name=name))
    assert (answer.lora.pinned, list(answer.lora.engine_ids)) == (True, ["a", "b"])
    digest = digest_of(rig.disk[f"/a/{name}"])
    assert [engine.held[digest] for engine in rig.engines] == [True, True]
    (listed,) = [each for each in (await rig.admin.ListLoras(admin_pb.ListLorasRequest())).loras if each.name == name]
    assert listed.pinned
    del rig.engines[1].held[digest]  # a restarted engine has no adapters
    answer = await rig.admin.PinLora(admin_pb.PinLoraRequest(name=name, unpin=True))
    assert not answer.lora.pinned
    assert (rig.engines[0].held[digest], digest in rig.engines[1].held) == (False, False)
    error = await failure(rig.admin.PinLora(admin_pb.PinLoraRequest(name="wrong")))
    assert (type(error), error.field) == (NotFound, "name")


async def test_content_stays_pinned_while_one_of_its_names_is(rig: Rig) -> None:
    digest = digest_of(rig.disk["/a/new"])

    def pinned() -> list[bool]:
        return [engine.held[digest] for engine in rig.engines]

    for name in ("one", "two"):
        await rig.load(name, pinned=True)
    await rig.admin.PinLora(admin_pb.PinLoraRequest(name="one", unpin=True))
    assert pinned() == [True, True]
    await rig.admin.UnloadLora(admin_pb.UnloadLoraRequest(name="two"))
    assert pinned() == [False, False]
    await rig.load("two", pinned=True)
    assert pinned() == [True, True]
    await rig.load("two", load_inplace=True)
    await eventually(lambda: pinned() == [False, False])


@pytest.mark.parametrize("fails", [False, True])
async def test_a_load_whose_caller_gave_up_is_done_whole_or_not_at_all(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    slow, kept = rig.engines[1], []
    answer = slow._answer

    def answer_later(call: Any, session: Any) -> None:
        kept.append(lambda: answer(call, session)) if call.method == "add_lora" else answer(call, session)

    monkeypatch.setattr(slow, "_answer", answer_later)
    load = rig.admin.LoadLora(admin_pb.LoadLoraRequest(name="new", path="/a/new", pinned=True), timeout=0.2)
    assert (await failure(load)).code == "DEADLINE_EXCEEDED"
    assert kept
    if fails:
        slow.failing = finish_pb2.RequestError(code="UNAVAILABLE", message="it is gone", reason="LORA_UNAVAILABLE")
    for each in kept:
        each()
    digest = digest_of("news")
    if fails:
        await eventually(lambda: not any(digest in engine.held for engine in rig.engines))
        assert await rig.names() == ["pirate", "poet"]
        return
    await eventually(lambda: [engine.held.get(digest) for engine in rig.engines] == [True, True])
    async with asyncio.timeout(PATIENCE):
        while "new" not in await rig.names():
            await asyncio.sleep(0.01)
    await rig.admin.UnloadLora(admin_pb.UnloadLoraRequest(name="new"))
    assert rig.held == [set(), set()]


async def test_an_engine_that_comes_holds_what_is_pinned(rig: Rig) -> None:
    await rig.load(pinned=True)
    await rig.admin.PinLora(admin_pb.PinLoraRequest(name="poet"))
    await rig.applied(lora="pirate")
    engine = rig.engines[1]
    await engine.kill()
    engine.held.clear()
    await engine.start(engine.port)
    await eventually(lambda: engine.held == {digest_of("news"): True, digest_of("odes"): True})


async def test_adapters_are_models_with_a_parent(rig: Rig) -> None:
    models = (await rig.frontend.stub.ListModels(pb.ListModelsRequest())).models
    assert [(each.name, each.parent) for each in models] == [("model", ""), ("pirate", "model"), ("poet", "model")]
    poet = (await rig.frontend.stub.GetModel(pb.GetModelRequest(name="poet"))).model
    assert (poet, poet.root, poet.num_engines) == (models[2], "/a/poet", 2)


async def test_nothing_is_loaded_without_engines(model: Path) -> None:
    async with FrontendServer(model, engines=["127.0.0.1:1"], lora=CONFIG) as frontend:
        error = await failure(frontend.admin.LoadLora(admin_pb.LoadLoraRequest(name="n", path="/a/n")))
        assert isinstance(error, Unavailable)
