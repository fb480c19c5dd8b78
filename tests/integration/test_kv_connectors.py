"""A plugin's KV connector: its calls for requests, the blocks that it loads, and its statistics."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock_common.errors import ConfigError, InvalidArgument, Unimplemented
from penstock_common.types.kv_transfer import KvParams
from penstock_common.types.outputs import EngineCoreOutput
from penstock_common.types.request import EngineCoreRequest, RequestContext
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.kv_transfer.core import registry
from tests.fakes.engines import shared_store
from tests.fakes.engines.in_process import CLIENT, build_engine
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.patience import PATIENCE

BLOCK = 4
PROMPT = list(range(5, 5 + 50))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kv") / "gemma2"
    save_tiny_model("gemma2", path)
    return path


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_KNOWN", {})
    shared_store.register()
    yield
    shared_store.STORES.clear()


def engine_of(model: Path, **kv_transfer: Any) -> EngineCore:
    cache = {"block_size": BLOCK, "num_blocks": 200, "min_load_tokens": 1}
    return build_engine(model, cache=cache, kv_transfer=kv_transfer)


def run(engine: EngineCore, params: str = "", max_tokens: int = 9) -> tuple[list[int], list[EngineCoreOutput]]:
    """Run a request with these parameters. Returns its tokens and outputs once no transfer is in flight."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=PROMPT,
        sampling_params=sampling,
        context=RequestContext(kv=KvParams(params=params)),
    )
    engine.add(engine.preprocess(CLIENT, request))
    outputs: list[EngineCoreOutput] = []
    deadline = time.monotonic() + PATIENCE
    pool = engine.scheduler.kv_cache.pool
    while engine.has_work or pool.num_free_blocks < pool.num_usable_blocks:
        for frame in engine.step(lambda: None).values():
            outputs += frame.outputs
        assert time.monotonic() < deadline
    return [token for output in outputs for token in output.new_token_ids], outputs


def test_what_one_engine_has_kept_another_one_does_not_compute(model: Path) -> None:
    first, second = (engine_of(model, connector=shared_store.NAME) for _ in range(2))
    expected, outputs = run(second)
    assert outputs[-1].kv_params == ""
    second.scheduler.reset_prefix_cache()
    _, outputs = run(first, json.dumps({"store": "one", "keep": True}), max_tokens=1)
    answer = outputs[-1].kv_params
    assert json.loads(answer) == {"store": "one"}
    tokens, outputs = run(second, answer)
    assert tokens == expected
    stats = next(output.prefill_stats for output in outputs if output.prefill_stats is not None)
    assert stats.num_peer_tokens == len(PROMPT) // BLOCK * BLOCK
    second.scheduler.reset_prefix_cache()
    tokens, outputs = run(second, json.dumps({"store": "another"}))
    assert tokens == expected
    stats = next(output.prefill_stats for output in outputs if output.prefill_stats is not None)
    assert (stats.num_peer_tokens, stats.num_cached_tokens) == (0, 0)
    for engine in (first, second):
        engine.shutdown()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ('{"what": 1}', "kv_transfer_params.what is unknown"),
        ("[1]", "kv_transfer_params is not a JSON object"),
        ("{", "kv_transfer_params is not valid JSON"),
        ("[" * 10_000, "kv_transfer_params is not valid JSON"),
        (f'{{"store": "{"x" * 16_384}"}}', "kv_transfer_params has 16397 bytes; it must have at most 16384"),
    ],
)
def test_parameters_that_it_does_not_take_are_refused_before_they_are_queued(
    model: Path, params: str, message: str
) -> None:
    engine = engine_of(model, connector=f"{shared_store.__name__}:StoreConnector")
    with pytest.raises(InvalidArgument, match=message):
        run(engine, params)
    engine.shutdown()


def test_engines_without_one_refuse_parameters_by_name(model: Path) -> None:
    plain = engine_of(model)
    tiers = build_engine(model, cache={"block_size": BLOCK, "num_blocks": 200, "host_memory": 1 << 20})
    for engine in (plain, tiers):
        with pytest.raises(Unimplemented, match=r"kv_transfer_params is set, .*kv_transfer\.connector") as refused:
            run(engine, "{}")
        assert refused.value.field == "kv_transfer_params"
        engine.shutdown()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shared_stor", "kv_transfer.connector is 'shared_stor'; known: shared_store; did you mean 'shared_store'"),
        ("no.such:Thing", "kv_transfer.connector is 'no.such:Thing', which cannot be loaded"),
        ("tests.fakes.engines.shared_store:Nothing", "which cannot be loaded"),
        (":Nothing", "which cannot be loaded"),
    ],
)
def test_a_connector_that_cannot_be_had_stops_the_start(model: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(model, connector=name)
