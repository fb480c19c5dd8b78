"""Data for operators about requests and calls: counters, the request log (log.requests), and the engines' load."""

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import pytest
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from penstock.coordinator.v1 import messages_pb2 as coordinator_pb
from penstock.coordinator.v1 import service_pb2_grpc as coordinator_grpc
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.config.sections import LogConfig, ServerConfig
from penstock_common.observability.logging import REQUEST_LOGGER, get_logger
from penstock_coordinator.app import Coordinator
from penstock_coordinator.config import CoordinatorConfig
from penstock_enginecore.metrics import EngineCollector
from penstock_frontend.config import HttpConfig, LimitsConfig, ModelConfig
from tests.fakes.engines.engine_harness import make_config
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.engines.fake_executor import FakeExecutor
from tests.fakes.frontends.frontend_server import FrontendServer, collect, eventually, failure

SERVICE = "penstock.inference.v1.InferenceService"
LOG = LogConfig(requests=True)
STEPS = "vllm:iteration_tokens_total"
TIMES = ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds")


def value(frontend: FrontendServer, name: str, **labels: str) -> float:
    return frontend.frontend._models[0].assembly.metrics.registry.get_sample_value(name, labels) or 0.0


def named(name: str, path: Path) -> ModelConfig:
    return ModelConfig(path=str(path), served_model_name=name)


def failed(frontend: FrontendServer, code: str) -> float:
    return value(frontend, "penstock:requests_failed_total", model_name="model", code=code)


def handled(frontend: FrontendServer, method: str, code: str, kind: str = "server_stream") -> float:
    labels = {"grpc_type": kind, "grpc_service": SERVICE, "grpc_method": method, "grpc_code": code}
    return value(frontend, "grpc_server_handled_total", **labels)


def about_requests(logs: list[Any]) -> list[Any]:
    return [line for line in logs if line["event"].startswith("request ")]


async def test_requests_are_counted_by_the_code_they_fail_with(engine: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[engine.address], limits=LimitsConfig(max_n=2)) as frontend:
        await frontend.outputs(max_tokens=1, n=2)
        await failure(frontend.generate(n=3))
        await failure(frontend.generate(model="other"))
        # The frontend counts a call when the handler ends, and the client may see the end earlier.
        await eventually(lambda: failed(frontend, "INVALID_ARGUMENT") == failed(frontend, "NOT_FOUND") == 1)
        assert failed(frontend, "CANCELLED") == 0
        assert value(frontend, "vllm:request_params_n_sum", model_name="model") == 2
        assert value(frontend, "vllm:request_params_n_count", model_name="model") == 1


async def test_a_request_that_is_not_accepted_counts_as_failed(manual: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[manual.address], limits=LimitsConfig(max_requests=1)) as frontend:
        first = asyncio.create_task(collect(frontend.generate(max_tokens=1)))
        await manual.until(lambda e: e.running)
        await failure(frontend.generate())
        await eventually(lambda: failed(frontend, "RESOURCE_EXHAUSTED") == 1)
        manual.step()
        await first


async def test_a_request_that_its_client_gives_up_counts_as_cancelled(manual: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[manual.address]) as frontend:
        call = frontend.generate()
        await manual.until(lambda e: e.running)
        call.cancel()
        await eventually(lambda: failed(frontend, "CANCELLED") == 1)
        await eventually(lambda: handled(frontend, "Generate", "CANCELLED") == 1)


async def test_calls_are_counted_by_method_and_code(frontend: FrontendServer) -> None:
    await frontend.outputs(max_tokens=1)
    await failure(frontend.generate(model="other"))
    await frontend.stub.ListModels(pb.ListModelsRequest())
    assert handled(frontend, "Generate", "OK") == 1
    assert handled(frontend, "Generate", "NOT_FOUND") == 1
    assert handled(frontend, "ListModels", "OK", kind="unary") == 1
    started = {"grpc_type": "server_stream", "grpc_service": SERVICE, "grpc_method": "Generate"}
    assert value(frontend, "grpc_server_started_total", **started) == 2


async def test_http_requests_are_counted_by_route_and_not_by_what_clients_make_up(
    engine: FakeEngine, model: Path
) -> None:
    http = HttpConfig(host="127.0.0.1", port=0)
    async with FrontendServer(model, engines=[engine.address], http=http) as frontend:
        await frontend.until_health(serving=True)
        for path in ("/health", "/made/up", "/else"):
            reader, writer = await asyncio.open_connection("127.0.0.1", frontend.frontend.http_port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            await reader.read()
            writer.close()
            await writer.wait_closed()
        assert value(frontend, "http_requests_total", handler="none", method="GET", status="4xx") == 2
        assert value(frontend, "http_requests_total", handler="/health", method="GET", status="2xx") == 1


async def test_frontends_tell_the_engines_load_unless_the_engines_do(engine: FakeEngine, model: Path) -> None:
    labels = {"model_name": "model", "engine": "engine-0", "num_gpu_blocks": "1024", "block_size": "16"}
    for told in (True, False):
        http = HttpConfig(host="127.0.0.1", port=0, engine_metrics=told)
        async with FrontendServer(model, engines=[engine.address], http=http) as frontend:
            await frontend.until_health(serving=True)
            assert value(frontend, "vllm:cache_config_info", **labels) == told
            names = {metric.name for metric in frontend.frontend._models[0].assembly.metrics.registry.collect()}
            assert ("vllm:num_requests_running" in names) == told


async def test_a_finished_request_is_one_line_with_its_id_and_counts(engine: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[engine.address], log=LOG) as frontend:
        with capture_logs() as logs:
            await frontend.outputs("a secret", max_tokens=3, request_id="r1")
    [line] = about_requests(logs)
    assert (line["event"], line["request"], line["finish"]) == ("request finished", "r1", ["length"])
    assert line["completion_tokens"] == 3
    assert line["first_token_after"] <= line["seconds"]
    assert "secret" not in str(logs)


async def test_lines_of_requests_say_whose_they_are_on_which_route_and_from_where(
    engine: FakeEngine, model: Path
) -> None:
    http = HttpConfig(host="127.0.0.1", port=0)
    limits = LimitsConfig(max_tenant_requests=1)
    async with FrontendServer(model, engines=[engine.address], log=LOG, http=http, limits=limits) as frontend:
        await frontend.until_health(serving=True)
        url = f"http://127.0.0.1:{frontend.frontend.http_port}"
        with capture_logs() as logs:
            await frontend.outputs("a", max_tokens=3, routing=pb.RoutingHints(tenant="acme"))
            async with httpx.AsyncClient(base_url=url) as client:
                headers = {"x-penstock-tenant": "beta"}
                body = {"prompt": ["a", "b"], "max_tokens": 1}
                assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 429
                body = {"prompt": "a", "max_tokens": 1, "n": 2}
                assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 400
        finished, full, wrong = about_requests(logs)
    assert (finished["event"], finished["tenant"]) == ("request finished", "acme")
    assert finished["route"] == "/penstock.inference.v1.InferenceService/Generate"
    assert finished["client"].startswith("127.0.0.1:")
    assert (full["event"], full["tenant"], full["route"], full["reason"]) == (
        "request refused",
        "beta",
        "/v1/completions",
        "TENANT_QUOTA",
    )
    assert full["client"].startswith("127.0.0.1:")
    assert (wrong["event"], wrong["code"], wrong["field"]) == (
        "request refused",
        "INVALID_ARGUMENT",
        "sampling_params.n",
    )


async def test_a_failed_request_is_one_line_with_its_id_and_code(engine: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[engine.address], log=LOG) as frontend:
        with capture_logs() as logs:
            await failure(frontend.generate("a secret", model="other", request_id="r1"))
            await eventually(lambda: about_requests(logs))
    [line] = about_requests(logs)
    assert (line["event"], line["request"], line["code"]) == ("request failed", "r1", "NOT_FOUND")
    assert (line["reason"], line["field"]) == ("NOT_FOUND", "model")
    assert "secret" not in str(logs)


async def test_requests_are_not_logged_unless_that_is_asked_for(engine: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[engine.address]) as frontend:
        with capture_logs() as logs:
            await frontend.outputs(max_tokens=1)
    assert about_requests(logs) == []


@pytest.mark.parametrize("kind", [1, 2, 3], ids=["delta", "cumulative", "final"])
async def test_prompts_and_outputs_are_logged_when_that_is_asked_for(
    engine: FakeEngine, model: Path, kind: int
) -> None:
    async with FrontendServer(model, engines=[engine.address], log=LogConfig(requests=True, prompts=True)) as frontend:
        with capture_logs() as logs:
            outputs = await frontend.outputs("a secret", max_tokens=9, n=2, seed=1, output_kind=kind)
    texts = {0: "", 1: ""}
    for output in outputs:
        texts[output.index] = texts[output.index] + output.text if kind == 1 else output.text
    [line] = about_requests(logs)
    assert (line["prompt"], line["outputs"]) == ("a secret", texts)


async def test_prompts_are_logged_only_of_requests_all_of_which_was_to_be_logged(
    manual: FakeEngine, model: Path
) -> None:
    all_of_it, lines_alone = LogConfig(requests=True, prompts=True), LogConfig(requests=True)

    async def lines_of(before: LogConfig, after: LogConfig) -> list[Any]:
        """Return the log lines of a request during which the log configuration is replaced."""
        async with FrontendServer(model, engines=[manual.address], log=before) as frontend:
            with capture_logs() as logs:
                call = frontend.generate("a secret", max_tokens=1)
                await manual.until(lambda e: len(e.running) == 1)
                frontend.frontend.apply(msgspec.structs.replace(frontend.config, log=after))
                manual.step()
                await collect(call)
                await eventually(lambda: about_requests(logs))
        return about_requests(logs)

    [kept] = await lines_of(all_of_it, all_of_it)
    assert kept["prompt"] == "a secret"
    for before, after in ((all_of_it, lines_alone), (lines_alone, all_of_it)):
        [line] = await lines_of(before, after)
        assert not {"prompt", "outputs"} & line.keys()


async def test_every_line_of_a_requests_task_has_its_id(frontend: FrontendServer, monkeypatch: Any) -> None:
    async def broken(*_: object) -> None:
        get_logger().warning("about to break")
        raise ZeroDivisionError

    monkeypatch.setattr(frontend.frontend._models[0].assembly.llm.inputs, "process", broken)
    with capture_logs(processors=[merge_contextvars]) as logs:
        await failure(frontend.generate(request_id="r1"))
    [line] = [line for line in logs if line["event"] == "about to break"]
    assert line["request"] == "r1"


async def test_the_engine_logs_what_it_refuses_with_both_ids_and_without_values(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = EngineServer(make_config(max_model_len=64), FakeExecutor(vocab_size=10))
    await asyncio.to_thread(lambda: engine.start().load())
    try:
        async with FrontendServer(model, engines=[engine.address], model=named("fake", model)) as frontend:
            with caplog.at_level(logging.INFO, REQUEST_LOGGER):
                await failure(frontend.generate(token_ids=pb.TokenIds(ids=[1]), logprobs=1000, request_id="r1"))
    finally:
        await asyncio.to_thread(engine.stop)
    [record] = [record for record in caplog.records if record.name == REQUEST_LOGGER]
    assert record.getMessage() == "request refused"
    fields = vars(record)
    assert (fields["request"], fields["code"], fields["field"]) == (
        "r1",
        "INVALID_ARGUMENT",
        "sampling_params.logprobs",
    )
    assert fields["engine_request"].startswith("r1-")


async def test_the_engine_logs_why_a_request_was_aborted(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    executor, step_may_end = FakeExecutor(vocab_size=10), threading.Event()
    executor.on_execute = step_may_end.wait  # type: ignore[assignment]  # whatever it returns
    engine = EngineServer(make_config(), executor)
    await asyncio.to_thread(lambda: engine.start().load())

    def lines() -> list[dict[str, Any]]:
        records = [vars(record) for record in caplog.records if record.name == REQUEST_LOGGER]
        return [fields for fields in records if fields["msg"] == "request aborted"]

    try:
        async with FrontendServer(model, engines=[engine.address], model=named("fake", model)) as frontend:
            with caplog.at_level(logging.INFO, REQUEST_LOGGER):
                call = frontend.generate(token_ids=pb.TokenIds(ids=[1]), ignore_eos=True, request_id="r1")
                await eventually(lambda: engine.busy_loop.stats().num_running_reqs)
                call.cancel()
                await eventually(engine.busy_loop._queues._aborts.qsize)
                step_may_end.set()
                await eventually(lines)
    finally:
        step_may_end.set()
        await asyncio.to_thread(engine.stop)
    [line] = lines()
    assert line["reason"] == "the client has disconnected"
    assert line["engine_request"].startswith("r1-")


async def test_a_real_engines_events_and_steps_are_measured(model: Path) -> None:
    engine = EngineServer(make_config(), FakeExecutor(vocab_size=10))
    await asyncio.to_thread(lambda: engine.start().load())
    try:
        loop = engine.busy_loop
        ready = engine.io._servicer._ready
        assert ready is not None
        registry = engine.io.registry
        registry.register(
            EngineCollector(
                loop.stats,
                engine.control.state,
                engine.engine.counts.tokens,
                ready,
                engine.engine.executor.worker_stats,
            )
        )
        labels = {"model_name": ready.model, "engine": ready.engine_id}
        async with FrontendServer(model, engines=[engine.address], model=named("fake", model)) as frontend:
            await frontend.outputs(token_ids=pb.TokenIds(ids=range(5)), max_tokens=3, ignore_eos=True)
            counts = [value(frontend, f"vllm:{name}_count", **labels) for name in TIMES]
        assert counts == [1] * len(TIMES)
        buckets = [registry.get_sample_value(f"{STEPS}_bucket", labels | {"le": le}) for le in ("1.0", "8.0")]
        assert buckets == [2, 3]  # one step for the prompt, then one step per token
        assert registry.get_sample_value(f"{STEPS}_sum", labels) == 7
        assert registry.get_sample_value("vllm:num_requests_running", labels) == 0
    finally:
        await asyncio.to_thread(engine.stop)


async def test_the_coordinator_counts_its_calls_and_says_what_it_is() -> None:
    coordinator = Coordinator(CoordinatorConfig(server=ServerConfig(host="127.0.0.1", port=0)))
    port = await coordinator.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await coordinator_grpc.CoordinatorServiceStub(channel).GetCluster(coordinator_pb.GetClusterRequest())
    await coordinator.stop()
    found = {
        sample.name: sample
        for metric in coordinator.registry.collect()
        for sample in metric.samples
        if sample.name in ("grpc_server_handled_total", "penstock:build_info")
    }
    calls, build = found["grpc_server_handled_total"], found["penstock:build_info"]
    assert (calls.labels["grpc_method"], calls.labels["grpc_code"], calls.value) == ("GetCluster", "OK", 1)
    assert build.labels["service"] == "coordinator"
