"""Metrics of an engine about its drafts; an engine without drafts exports none."""

from typing import Any

from prometheus_client import CollectorRegistry

from penstock_common.observability.metrics import Buckets
from penstock_common.types.outputs import EngineReady, SchedulerStats, SpecDecodingStats
from penstock_enginecore.config.speculative import SpeculativeConfig
from penstock_enginecore.core.control import EngineState
from penstock_enginecore.metrics import EngineCollector
from penstock_enginecore.speculation.core.draft_planner import speculation_facts

LABELS = {"model_name": "m", "engine": "engine-0"}
READY = EngineReady(
    engine_id="engine-0", incarnation="1", model="m", max_model_len=8, num_kv_blocks=4, block_size=16, vocab_size=9
)
DRAFTS = SpecDecodingStats()
DRAFTS.count(4, 2)
DRAFTS.count(4, 4)
DRAFTS.count(1, 0)


def registry(stats: SchedulerStats, **state: Any) -> CollectorRegistry:
    found = CollectorRegistry()
    engine_state = EngineState(paused=False, sleep_level=0, num_nan_logits=0, **state)
    found.register(EngineCollector(lambda: stats, lambda: engine_state, Buckets([1.0]), READY, list))
    return found


def test_an_engine_that_speculates_counts_drafts_under_vllms_names() -> None:
    found = registry(SchedulerStats(spec_decoding_stats=DRAFTS), drafter_failure="")
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    assert [found.get_sample_value(f"vllm:spec_decode_{name}_total", LABELS) for name in names] == [3, 9, 6]
    per_pos = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    places = [found.get_sample_value(per_pos, {**LABELS, "position": str(place)}) for place in range(5)]
    assert places == [2, 2, 1, 1, None]
    assert found.get_sample_value("penstock:spec_decode_drafter_up", LABELS) == 1


def test_a_drafter_that_was_switched_off_is_down() -> None:
    found = registry(SchedulerStats(spec_decoding_stats=DRAFTS), drafter_failure="ValueError: no")
    assert found.get_sample_value("penstock:spec_decode_drafter_up", LABELS) == 0


def test_an_engine_that_does_not_speculate_has_no_such_metrics() -> None:
    assert not [family.name for family in registry(SchedulerStats()).collect() if "spec_decode" in family.name]


def test_operators_are_shown_the_method_the_counts_and_why_it_was_switched_off() -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    facts = speculation_facts(config, DRAFTS, "ValueError: no")
    assert facts == {
        "method": "ngram",
        "model": "",
        "num_speculative_tokens": 4,
        "failure": "ValueError: no",
        "num_drafts": 3,
        "num_draft_tokens": 9,
        "num_accepted_tokens": 6,
        "num_accepted_tokens_per_pos": [2, 2, 1, 1],
    }
    assert speculation_facts(SpeculativeConfig(), None, None) is None
