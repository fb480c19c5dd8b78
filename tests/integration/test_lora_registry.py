"""Frontends share LoRA adapter names through a coordinator, also after the coordinator restarts.

The engines are fakes without a model.
"""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.coordinator.v1 import messages_pb2 as pb
from penstock_common.config.sections import ServerConfig
from penstock_common.types.cluster import EngineRegistration
from penstock_common.types.outputs import SchedulerStats
from penstock_coordinator.config import LoraNamesConfig
from penstock_enginecore.config import CoordinatorClientConfig as EngineSide
from penstock_enginecore.rpc.coordinator_client import CoordinatorClient as EngineClient
from penstock_frontend.config import CoordinatorClientConfig, LoraConfig
from tests.fakes.engines.lora_engine import LoraEngine, digest_of
from tests.fakes.frontends.frontend_server import FrontendServer, eventually
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.network.ports import free_port
from tests.fakes.systems.cluster_members import Engine, address_of, alive, connected, running

VOCAB = byte_level().get_vocab_size()
CONFIG = LoraConfig(enabled=True, roots=("/a",))


class Member(Engine):
    """Registers a LoraEngine with the coordinator."""

    def __init__(self, address: str, engine: LoraEngine) -> None:
        self.client = EngineClient(
            EngineSide(address=address, stats_interval=0.02, reconnect_max=0.1),
            registration=lambda: EngineRegistration(
                engine_id=engine.ready.engine_id, incarnation="1", address=engine.address, model="model"
            ),
            stats=SchedulerStats,
            on_command=lambda command: None,
        )


def frontend_at(model: Path, address: str, name: str, lora: LoraConfig = CONFIG) -> FrontendServer:
    link = CoordinatorClientConfig(address=address, reconnect_max=0.1)
    return FrontendServer(model, coordinator=link, frontend_id=name, lora=lora)


async def load(frontend: FrontendServer, name: str, path: str, **fields: Any) -> None:
    await frontend.admin.LoadLora(admin_pb.LoadLoraRequest(name=name, path=path, **fields))


def named(frontend: FrontendServer) -> dict[str, str]:
    """Return the paths of the adapters that requests to this frontend can use, by name."""
    adapters = frontend.frontend._models[0].assembly.llm.adapters.adapters
    return {each.name: each.adapter.path for each in adapters.all()}


def num_names(frontend: FrontendServer, source: str) -> float | None:
    """Return the number of adapter names from a source, according to the metrics."""
    labels = {"model_name": "model", "source": source}
    return frontend.frontend._models[0].assembly.metrics.registry.get_sample_value("penstock:lora_names", labels)


@pytest.fixture
async def engine() -> AsyncIterator[LoraEngine]:
    disk = {"/a/x": "content of x", "/a/y": "content of y"}
    async with LoraEngine("e", disk, vocab_size=VOCAB) as engine:
        yield engine


async def test_an_adapter_loaded_on_one_frontend_is_served_by_the_other(engine: LoraEngine, model: Path) -> None:
    async with running() as coordinator:
        address = address_of(coordinator)
        async with (
            alive(Member(address, engine)),
            frontend_at(model, address, "f1") as first,
            frontend_at(model, address, "f2") as second,
        ):
            await first.until_engines(1)
            await second.until_engines(1)
            await load(first, "x", "/a/x", pinned=True)
            await eventually(lambda: named(second) == {"x": "/a/x"})
            counts = {source: num_names(second, source) for source in ("config", "directory", "run_time")}
            assert counts == {"config": 0, "directory": 0, "run_time": 1}
            await second.outputs(model="x", max_tokens=1)
            assert engine.requests[-1].lora.digest == digest_of("content of x")
            assert second.frontend._models[0].assembly.llm.adapters.adapters.named("x").pinned
            await load(second, "x", "/a/y", load_inplace=True)
            await eventually(lambda: named(first) == {"x": "/a/y"})
            await first.admin.UnloadLora(admin_pb.UnloadLoraRequest(name="x"))
            await eventually(lambda: named(second) == {})
            async with frontend_at(model, address, "f3") as third:
                await third.until_engines(1)
                assert named(third) == {}
                await load(
                    third, "x", "/a/x"
                )  # the third frontend knows the name's version, so this load is newer than the unload
                await eventually(lambda: named(first) == named(second) == {"x": "/a/x"})


async def test_a_coordinator_that_starts_again_hears_all_names_from_frontends(engine: LoraEngine, model: Path) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    at = ServerConfig(host="127.0.0.1", port=port)
    async with contextlib.AsyncExitStack() as stack:
        async with running(server=at):
            await stack.enter_async_context(alive(Member(address, engine)))
            first = await stack.enter_async_context(frontend_at(model, address, "f1"))
            second = await stack.enter_async_context(frontend_at(model, address, "f2"))
            await first.until_engines(1)
            await second.until_engines(1)
            await load(first, "x", "/a/x")
            await load(second, "y", "/a/y")
            await eventually(lambda: named(first) == named(second) == {"x": "/a/x", "y": "/a/y"})
        await load(first, "z", "/a/x")  # while the coordinator is stopped
        await second.admin.UnloadLora(admin_pb.UnloadLoraRequest(name="y"))
        assert named(first) == {"x": "/a/x", "y": "/a/y", "z": "/a/x"}
        async with running(server=at):
            await eventually(lambda: named(first) == named(second) == {"x": "/a/x", "z": "/a/x"})
            third = await stack.enter_async_context(frontend_at(model, address, "f3"))
            await eventually(lambda: named(third) == {"x": "/a/x", "z": "/a/x"})
            await stack.aclose()


async def test_frontends_that_serve_no_adapters_are_told_of_none(engine: LoraEngine, model: Path) -> None:
    async with running() as coordinator:
        address = address_of(coordinator)
        async with (
            alive(Member(address, engine)),
            frontend_at(model, address, "f1") as first,
            frontend_at(model, address, "f2", LoraConfig()) as other,
        ):
            await first.until_engines(1)
            await other.until_engines(1)
            await load(first, "x", "/a/x")
            await load(first, "y", "/a/y")
            assert named(other) == {}
            assert other.frontend._models[0].coordinator is not None
            assert other.frontend._models[0].coordinator.connected


def registration(**fields: Any) -> pb.LoraRegistration:
    return pb.LoraRegistration(
        **{"name": "x", "version": 1, "frontend_id": "f", "path": "/a", "digest": bytes(16)} | fields
    )


@pytest.mark.parametrize(
    ("registrations", "views", "message"),
    [
        ([registration(name="")], True, "loras.registrations[0].name has 0 characters; it must have from 1 to 256"),
        ([registration(name="x" * 257)], True, "name has 257 characters"),
        ([registration(), registration(version=0)], True, "loras.registrations[1].version is 0"),
        ([registration(version=2**63)], True, "version is 9223372036854775808"),
        ([registration(frontend_id="")], True, "frontend_id has 0 characters"),
        ([registration(path="")], True, "path has 0 characters"),
        ([registration(digest=b"1")], True, "digest has 1 bytes; it must have 16"),
        ([registration()] * 257, True, "loras.registrations has 257 entries; it must have at most 256"),
        ([registration()], False, "sent loras, but did not set hello.views.loras"),
    ],
)
async def test_registrations_that_no_frontend_may_send_end_its_stream(
    registrations: list[pb.LoraRegistration], views: bool, message: str
) -> None:
    hello = pb.FrontendHello(frontend_id="f", incarnation="1", views=pb.ViewSubscription(loras=views, model="model"))
    async with running() as coordinator, connected(address_of(coordinator)) as stub:
        call = stub.FrontendSession()
        await call.write(pb.FrontendReport(hello=hello))
        await call.write(pb.FrontendReport(loras=pb.LoraRegistrations(registrations=registrations)))
        with pytest.raises(grpc.aio.AioRpcError, match=r".*") as ended:
            while await call.read() is not grpc.aio.EOF:
                pass
            await call
        assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert message in str(ended.value.details())
        assert coordinator._cluster.adapters.num_bytes == 0


async def test_a_frontend_is_told_which_names_the_coordinator_has_no_room_for() -> None:
    views = pb.ViewSubscription(loras=True, model="model")
    hello = pb.FrontendHello(frontend_id="f", incarnation="1", views=views)
    async with (
        running(lora=LoraNamesConfig(max_registered=1)) as coordinator,
        connected(address_of(coordinator)) as stub,
    ):
        call = stub.FrontendSession()
        await call.write(pb.FrontendReport(hello=hello))
        said = pb.LoraRegistrations(registrations=[registration(name="x"), registration(name="y")])
        await call.write(pb.FrontendReport(loras=said))
        while not (message := await call.read()).loras.refused:
            pass
        (refused,) = message.loras.refused
        assert refused.name == "y"
        assert refused.reason == "the model has 1 adapter names; lora.max_registered is 1"


async def test_names_of_a_model_without_frontends_are_forgotten_in_time() -> None:
    views = pb.ViewSubscription(loras=True, model="model")
    hello = pb.FrontendHello(frontend_id="f", incarnation="1", views=views)
    async with running(lora=LoraNamesConfig(forget_after=0)) as coordinator:
        adapters = coordinator._cluster.adapters
        async with connected(address_of(coordinator)) as stub:
            call = stub.FrontendSession()
            await call.write(pb.FrontendReport(hello=hello))
            await call.write(pb.FrontendReport(loras=pb.LoraRegistrations(registrations=[registration()])))
            await eventually(lambda: adapters.num_bytes > 0)
        await eventually(lambda: len(adapters) == 0)
