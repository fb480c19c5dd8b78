"""monitoring/_rules.tpl: values set the thresholds of alerts, and no placeholder in capitals remains."""

import re
from pathlib import Path

import pytest
import yaml

from charts import lint
from penstock_coordinator.rpc.external_scaler import SERVICE_NAME
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


def test_certificates_are_told_of_so_many_days_before_their_end():
    assert rules()["PenstockCertificateExpires"]["expr"].endswith(" < 7 * 86400")
    assert rules(f"{VALUE}certificateDays=2")["PenstockCertificateExpires"]["expr"].endswith(" < 2 * 86400")


@pytest.mark.parametrize(
    "settings",
    [
        ("enginecore.autoscaling.mode=keda", "enginecore.autoscaling.minReplicas=0"),
        ("enginecore.replicas=0",),
        ("enginecore.pools.a.replicas=0", "enginecore.pools.b.replicas=0"),
    ],
)
def test_where_there_may_be_no_engine_only_one_that_is_waited_for_is_missed(settings: tuple[str, ...]):
    missed = rules(*settings)["PenstockNoEngine"]
    assert "penstock:requests_held" in missed["expr"]
    assert missed["for"] == rules()["PenstockEngineUnreachable"]["for"]
    assert "unless" in rules(*settings)["PenstockRequestsHeld"]["expr"]


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("enginecore.autoscaling.mode=keda",),
        (
            "enginecore.pools.a.autoscaling.mode=keda",
            "enginecore.pools.a.autoscaling.minReplicas=0",
            "enginecore.pools.b.replicas=1",
        ),
    ],
)
def test_where_a_pool_has_to_have_an_engine_none_is_missed_at_once(settings: tuple[str, ...]):
    missed = rules(*settings)["PenstockNoEngine"]
    assert (
        missed["expr"]
        == 'sum by (namespace, release) (penstock_coordinator_engines{namespace="serving",release="demo",state="serving"}) == 0'
    )
    assert missed["for"] == "5m"
    assert "unless" not in rules(*settings)["PenstockRequestsHeld"]["expr"]


def test_no_alert_is_lost_with_the_engines():
    assert rules("enginecore.replicas=0").keys() == rules().keys()
    assert not [name for name, rule in rules().items() if "where" in rule]


def test_kedas_service_is_the_coordinators():
    assert f'grpc_service="{SERVICE_NAME}"' in rules()["PenstockScalerErrors"]["expr"]


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
    words = re.compile(
        r"SELECTOR|NAMESPACE|INSTANCE|FULLNAME|START_UP|HELD_FOR|KV_CACHE_USAGE|CERTIFICATE_DAYS|RATIO|_SECONDS"
    )
    assert not [name for name, rule in rules().items() if words.search(str(rule))]
