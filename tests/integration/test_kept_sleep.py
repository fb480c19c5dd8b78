"""Engines whose weights and KV cache keep their addresses during sleep, on a device that loses the contents of freed
memory.

The tests run on a CPU, with fake virtual memory of the driver and with recorded graphs.
"""

from pathlib import Path

import pytest
import torch

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.models.errors import ModelLoadError
from tests.fakes.engines.in_process import answer, build_engine, generate
from tests.fakes.engines.late_device import LastMoment, choose_on_device
from tests.fakes.models.fake_driver import FakeDriver
from tests.fakes.models.fused_models import offer_fused, save_varied_model
from tests.fakes.models.quantized_models import save_quantized_model
from tests.fakes.multimodal_models import make_image, save_multimodal_model
from tests.fakes.multimodal_prompts import PromptMaker

OPEN = "penstock_enginecore.executor.sleep_in_place.open_driver"
KEPT = {"executor": {"keep_addresses": True}, "cache": {"block_size": 16, "num_blocks": 40}}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    torch.set_num_threads(1)
    offer_fused(monkeypatch)
    choose_on_device(monkeypatch, LastMoment)
    driver = FakeDriver()
    monkeypatch.setattr(OPEN, lambda device: driver)
    return driver


def tokens(engine: EngineCore, name: str) -> dict[str, list[int]]:
    """Return the tokens of a greedy request and of a sampled one."""
    settings = {"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "top_k": 40}
    wanted = [SamplingParams(max_tokens=8, ignore_eos=True, **of) for of in settings]
    run = generate(engine, [(f"{name}{i}", list(range(5 + i, 25)), each) for i, each in enumerate(wanted)])
    return {request_id.removeprefix(name): found for request_id, found in run.tokens.items()}


@pytest.mark.parametrize(("form", "level"), [("", 1), ("", 2), ("awq", 2), ("fp8-blocks", 2)])
def test_an_engine_wakes_with_its_weights_its_graphs_and_an_empty_cache(
    form: str, level: int, tmp_path: Path, driver: FakeDriver
) -> None:
    if form:
        save_quantized_model("llama", form, tmp_path, hidden_size=64)
    else:
        save_varied_model("gemma3", tmp_path)
    engine = build_engine(tmp_path, **KEPT)
    expected, awake = tokens(engine, "a"), driver.used
    before = engine.executor.worker_stats()[0]
    assert awake > before.weight_bytes
    control = EngineControl(engine)
    control.sleep(level).result()
    assert driver.used == 0
    asleep = engine.executor.worker_stats()[0]
    assert (asleep.weight_bytes > 0, asleep.kv_cache_bytes) == (level == 1, 0)
    control.wake_up(["weights"])
    assert 0 < driver.used < awake
    control.wake_up(["kv_cache"])
    assert driver.used == awake
    assert tokens(engine, "b") == expected
    after = engine.executor.worker_stats()[0]
    assert after.graphs.captured == before.graphs.captured
    assert after.graphs.replays == before.graphs.replays + 8  # includes the replays for the prompts
    assert (after.weight_bytes, after.kv_cache_bytes) == (before.weight_bytes, before.kv_cache_bytes)
    engine.shutdown()
    assert driver.is_clean


def test_modules_wake_as_the_fused_decoder_does(
    tmp_path: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_varied_model("olmo2", tmp_path)
    sections = {**KEPT, "kernels": {"isa": "off"}, "model": {"attention_backend": "reference"}}
    engine = build_engine(tmp_path, **sections)
    expected = tokens(engine, "a")
    control = EngineControl(engine)
    for level in (2, 1):
        control.sleep(level).result()
        control.wake_up()
        assert tokens(engine, f"after level {level}, ") == expected
    engine.shutdown()
    assert driver.is_clean


@pytest.mark.parametrize("level", [1, 2])
def test_towers_keep_their_addresses_too(level: int, tmp_path: Path, driver: FakeDriver) -> None:
    prompt = PromptMaker(tmp_path, save_multimodal_model("llava", tmp_path)).make("See ", make_image(40, 40), "?")
    expected = {"a": prompt.expected(8)}
    engine = build_engine(tmp_path, **KEPT)
    assert answer(engine, [prompt.request("a", 8)]).tokens == expected
    awake, control = driver.used, EngineControl(engine)
    control.sleep(level).result()
    assert driver.used == 0
    control.wake_up()
    assert driver.used == awake
    assert answer(engine, [prompt.request("a", 8)]).tokens == expected
    engine.shutdown()
    assert driver.is_clean


def test_weights_that_cannot_be_read_again_sleep_on_until_they_can(tmp_path: Path, driver: FakeDriver) -> None:
    save_varied_model("qwen3", tmp_path)
    engine = build_engine(tmp_path, **KEPT)
    expected = tokens(engine, "a")
    control = EngineControl(engine)
    control.sleep(2).result()
    weights = next(tmp_path.glob("*.safetensors"))
    weights.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelLoadError):
        control.wake_up()
    assert control.is_sleeping()
    (tmp_path / "elsewhere").rename(weights)
    control.wake_up()
    assert tokens(engine, "b") == expected
    engine.shutdown()


def test_without_kept_addresses_an_engine_still_sleeps_and_logs_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(1)
    save_varied_model("qwen3", tmp_path)
    engine = build_engine(tmp_path, **KEPT)
    assert (
        "executor.keep_addresses has no effect: on device cpu, memory cannot be freed and allocated again at the same address"
        in caplog.text
    )
    control = EngineControl(engine)
    control.sleep(1).result()
    control.wake_up()
    assert len(tokens(engine, "a")["0"]) == 8
    engine.shutdown()
