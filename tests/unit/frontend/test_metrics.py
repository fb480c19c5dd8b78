"""Effects of engine outputs on the frontend's metrics."""

from typing import Any

import pytest

from penstock_common.observability.metrics import EngineLoad
from penstock_common.types.outputs import (
    EngineCoreEvent,
    EngineCoreOutput,
    EventType,
    FinishReason,
    KvTransferStats,
    SchedulerStats,
)
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.metrics import FrontendMetrics, merged
from penstock_frontend.processing.outputs.processor import OutputProcessor
from penstock_frontend.processing.prompts.tokenizer import Tokenizer
from tests.fakes.models import small_tokenizers

TOKENIZER = Tokenizer(small_tokenizers.byte_level())


class Rig:
    """One engine, whose clock the test sets."""

    def __init__(self) -> None:
        self.metrics = FrontendMetrics("m")
        self.processor = OutputProcessor(TOKENIZER, self.metrics)

    def add(self, *request_ids: str, **params: Any) -> None:
        for request_id in request_ids:
            self.processor.add(
                EngineCoreRequest(
                    request_id=request_id, prompt_token_ids=[1, 2, 3], sampling_params=SamplingParams(**params)
                )
            )

    def step(self, now: float, *outputs: EngineCoreOutput) -> None:
        self.processor.process(outputs, "e", now)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, {"model_name": "m", "engine": "e"} | labels)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def output(request_id: str = "r", offset: int = 0, tokens: int = 1, **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id=request_id, offset=offset, new_token_ids=[97] * tokens, **fields)


def events(**times: float) -> list[EngineCoreEvent]:
    return [EngineCoreEvent(EventType[name.upper()], time) for name, time in times.items()]


def test_times_of_a_request_are_measured_on_the_engines_clock(rig: Rig) -> None:
    rig.add("r")
    rig.step(105.0, output(events=events(queued=100.0, scheduled=102.0)))
    rig.step(109.0, output(offset=1))
    rig.step(112.0, output(offset=2, finish_reason=FinishReason.LENGTH))
    assert rig.value("vllm:request_queue_time_seconds_sum") == 2
    assert rig.value("vllm:request_prefill_time_seconds_sum") == 3
    assert rig.value("vllm:request_decode_time_seconds_sum") == 7
    assert rig.value("vllm:inter_token_latency_seconds_sum") == 7
    assert rig.value("vllm:inter_token_latency_seconds_count") == 2


def test_a_request_that_is_preempted_has_waited_until_it_was_first_scheduled(rig: Rig) -> None:
    rig.add("r")
    rig.step(105.0, output(events=events(queued=100.0, scheduled=101.0)))
    again = events(preempted=106.0, scheduled=108.0)
    rig.step(109.0, output(offset=1, events=again, finish_reason=FinishReason.STOP))
    assert rig.value("vllm:request_queue_time_seconds_sum") == 1


def test_outputs_of_one_step_count_each_sequence(rig: Rig) -> None:
    rig.add("r", "s")
    rig.step(1.0, output("r"), output("s"))
    rig.step(1.25, output("r", 1), output("s", 1, tokens=2))
    assert rig.value("vllm:inter_token_latency_seconds_count") == 2
    assert rig.value("vllm:inter_token_latency_seconds_bucket", le="0.3") == 2
    assert rig.value("vllm:inter_token_latency_seconds_bucket", le="0.2") == 0
    assert rig.value("vllm:generation_tokens_total") == 5
    assert rig.value("vllm:prompt_tokens_total") == 6


def test_what_requests_asked_for_and_got_is_counted_at_their_end(rig: Rig) -> None:
    rig.add("r", max_tokens=40)
    rig.step(1.0, output(tokens=2))
    assert rig.value("vllm:request_params_max_tokens_count") in (0, None)
    rig.step(2.0, output(offset=2, finish_reason=FinishReason.STOP))
    assert rig.value("vllm:request_params_max_tokens_sum") == 40
    assert rig.value("vllm:request_prompt_tokens_sum") == 3
    assert rig.value("vllm:request_generation_tokens_sum") == 3
    assert rig.value("vllm:request_success_total", finished_reason="stop") == 1


def test_a_request_without_max_tokens_is_not_among_those_that_set_it(rig: Rig) -> None:
    rig.add("r")
    rig.step(1.0, output(finish_reason=FinishReason.STOP))
    assert rig.value("vllm:request_params_max_tokens_count") == 0


def test_an_engine_that_tells_no_events_spoils_no_times(rig: Rig) -> None:
    rig.add("r")
    rig.step(5.0, output(finish_reason=FinishReason.STOP))
    assert rig.value("vllm:request_queue_time_seconds_count") == 0
    assert rig.value("vllm:request_prefill_time_seconds_count") == 0
    assert rig.value("vllm:request_decode_time_seconds_count") == 1


def test_an_engines_series_show_as_zero_before_its_first_request(rig: Rig) -> None:
    assert rig.value("vllm:generation_tokens_total") is None
    rig.metrics.engine("e")
    assert rig.value("vllm:generation_tokens_total") == 0
    assert rig.value("vllm:time_to_first_token_seconds_count") == 0


def test_engines_load_is_read_when_it_is_scraped(rig: Rig) -> None:
    moved = KvTransferStats(
        external_prefix_cache_queries=9, external_prefix_cache_hits=8, num_leases=2, num_leased_blocks=7
    )
    stats = SchedulerStats(num_running_reqs=3, num_waiting_reqs=2, prefix_cache_hits=5, kv_transfer=moved)
    loads = [EngineLoad(model="m", engine="e", num_kv_blocks=8, block_size=16, max_num_seqs=4, stats=stats)]
    rig.metrics.add_engine_loads(lambda: loads)
    assert rig.value("vllm:num_requests_running") == 3
    assert rig.value("penstock:load") == 1.25
    assert rig.value("vllm:prefix_cache_hits_total") == 5
    assert rig.value("vllm:external_prefix_cache_queries_total") == 9
    assert rig.value("vllm:external_prefix_cache_hits_total") == 8
    assert (rig.value("penstock:kv_leases"), rig.value("penstock:kv_leased_blocks")) == (2, 7)
    assert rig.value("vllm:cache_config_info", num_gpu_blocks="8", block_size="16") == 1
    loads.clear()
    assert rig.value("vllm:num_requests_running") is None


def test_an_engine_that_does_not_say_how_much_it_runs_at_once_has_no_load(rig: Rig) -> None:
    loads = [EngineLoad(model="m", engine="e", num_kv_blocks=8, block_size=16, max_num_seqs=0, stats=SchedulerStats())]
    rig.metrics.add_engine_loads(lambda: loads)
    assert rig.value("penstock:load") is None
    assert rig.value("vllm:num_requests_running") == 0


FIRST_TOKEN = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
BETWEEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
REQUEST = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
TOKENS = "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000 200000 500000 1000000"


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("vllm:time_to_first_token_seconds", FIRST_TOKEN),
        ("vllm:inter_token_latency_seconds", BETWEEN),
        ("vllm:e2e_request_latency_seconds", REQUEST),
        ("vllm:request_queue_time_seconds", REQUEST),
        ("vllm:request_prefill_time_seconds", REQUEST),
        ("vllm:request_decode_time_seconds", REQUEST),
        ("vllm:request_prompt_tokens", TOKENS),
        ("vllm:request_generation_tokens", TOKENS),
        ("vllm:request_params_max_tokens", TOKENS),
        ("vllm:request_params_n", "1 2 5 10 20"),
    ],
)
def test_buckets_are_those_of_vllms_dashboards(rig: Rig, name: str, bounds: str) -> None:
    rig.metrics.engine("e")
    [metric] = [metric for metric in rig.metrics.registry.collect() if metric.name == name]
    found = [sample.labels["le"] for sample in metric.samples if "le" in sample.labels]
    assert [float(bound) for bound in found] == [*map(float, bounds.split()), float("inf")]


def test_registries_of_several_models_are_merged_to_one_family_each() -> None:
    first, second = FrontendMetrics("a"), FrontendMetrics("b", with_process=False)
    first.engine("e").first_token(0.5, 3)
    second.engine("e").first_token(0.5, 4)
    every = list(merged([first.registry, second.registry]).collect())
    names = [family.name for family in every]
    assert len(names) == len(set(names))
    tokens = next(family for family in every if family.name == "vllm:prompt_tokens")
    found = {s.labels["model_name"]: s.value for s in tokens.samples if s.name == "vllm:prompt_tokens_total"}
    assert found == {"a": 3.0, "b": 4.0}
    assert merged([first.registry]) is first.registry
    assert [len(family.samples) for family in merged([first.registry, second.registry]).collect()] == [
        len(family.samples) for family in every
    ]
