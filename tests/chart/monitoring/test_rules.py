"""monitoring/_rules.tpl: the thresholds of the alerts are the values', and no word in capitals is left unfilled."""

import re
from pathlib import Path

import pytest
import yaml

from charts import lint
from tests.chart.monitoring.test_prometheusrule import rules, rules_of
from tests.chart.rendering import HUB, VALUE_SETS, Release

VALUE = "metrics.prometheusRule."


@pytest.mark.parametrize(
    ("value", "threshold", "alert"),
    [
        ("kvCacheUsage", 0.5, "PenstockKvCacheFull"),
        ("errorRatio", 0.2, "PenstockErrors"),
        ("errorRatio", 0.2, "PenstockOverloaded"),
        ("firstTokenSeconds", 3, "PenstockFirstTokenSlow"),
        ("interTokenSeconds", 0.125, "PenstockTokensSlow"),
    ],
)
def test_a_threshold_is_its_value(value: str, threshold: float, alert: str, tmp_path: Path):
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"metrics": {"prometheusRule": {"enabled": True, value: threshold}}}))
    changed = rules_of(Release(lint.render(VALUE_SETS[HUB], values)))[alert]["expr"]
    ends_so = re.compile(rf"> {re.escape(str(threshold))}$", re.MULTILINE)
    assert ends_so.search(changed)
    assert not ends_so.search(rules()[alert]["expr"])


def test_requests_are_held_for_as_long_as_is_said():
    assert rules()["PenstockRequestsHeld"]["for"] == "120s"
    assert rules(f"{VALUE}heldSeconds=600")["PenstockRequestsHeld"]["for"] == "600s"


def test_an_engine_may_take_as_long_to_start_as_its_probe_allows():
    assert rules()["PenstockEngineUnreachable"]["for"] == "1860s"
    slow = rules("enginecore.probes.startup.failureThreshold=720")
    assert slow["PenstockEngineUnreachable"]["for"] == "3660s"
    pool = rules("enginecore.pools.large.probes.startup.failureThreshold=1000", "enginecore.pools.small.replicas=1")
    assert pool["PenstockEngineUnreachable"]["for"] == "5060s"


def test_every_word_is_filled_in():
    words = re.compile(r"SELECTOR|NAMESPACE|INSTANCE|FULLNAME|START_UP|HELD_FOR|KV_CACHE_USAGE|RATIO|_SECONDS")
    assert not [name for name, rule in rules().items() if words.search(str(rule))]
