"""Running services export every metric and label that the chart's rules, the dashboard and the docs name."""

import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from penstock_common.observability.metrics import Buckets, Readings
from penstock_common.rpc.credentials import ClientCredentials
from penstock_common.security.tls import Certificates
from penstock_common.types.kv_transfer import KvMedium
from penstock_common.types.outputs import EngineReady, KvTransferStats, SchedulerStats
from penstock_coordinator.kubernetes.errors import Failures, KubernetesError, Right
from penstock_enginecore.core.control import EngineState
from penstock_enginecore.kv_transfer.core.size_class import TierStats
from penstock_enginecore.kv_transfer.core.transfer_stats import PART, Transfer
from penstock_enginecore.kv_transfer.metrics import TransferCounts, tier_families, transfer_families
from penstock_enginecore.metrics import EngineCollector
from penstock_frontend.metrics import MediaMetrics
from tests.fakes.frontends.frontend_server import collect, failure
from tests.fakes.network.certificates import Authority
from tests.fakes.systems.small_system import ADAPTERS, System, started

queries = pytest.importorskip(
    "tests.monitoring.queries", reason="promql-parser is not installed: make setup installs it", exc_type=ImportError
)
OF_PROMETHEUS = {"up": frozenset()}
"""Metrics that Prometheus itself adds for each scrape."""


def served(registries: Iterable[CollectorRegistry]) -> dict[str, set[str]]:
    """Return all labels of each metric's series."""
    found: dict[str, set[str]] = defaultdict(set)
    for registry in registries:
        for family in registry.collect():
            for sample in family.samples:
                found[sample.name] |= sample.labels.keys()
    return found


def problems(named: dict[str, str], there: dict[str, set[str]]) -> list[str]:
    """Return the names in the queries that no service exports."""
    found = []
    for name, query in named.items():
        uses = list(queries.uses(query))
        metrics = [use.metric for use in uses if use.metric]
        found += [f"{name}: nobody serves {metric}" for metric in metrics if metric not in there]
        anywhere = set().union(*(there.get(metric, set()) for metric in metrics))
        for metric, labels in uses:
            known = (there.get(metric, set()) if metric else anywhere) | queries.TARGET_LABELS
            found += [f"{name}: {metric or 'no metric'} has the label {label}" for label in labels - known]
    return found


async def used(system: System) -> None:
    """Cause events whose metrics appear only after the first event: finished, failed and refused requests."""
    await collect(system.generate())
    await collect(system.generate(lora=next(iter(ADAPTERS))))
    await failure(system.generate(model="other"))
    system.frontend.frontend._models[0].assembly.metrics.series("penstock:legs", "two", "long").inc()
    system.frontend.frontend._models[0].assembly.llm.end_all()
    await failure(system.generate())


def in_kubernetes(folder: Path) -> CollectorRegistry:
    """Return metrics that appear only with TLS, or after an API server refused a request."""
    registry = CollectorRegistry()
    registry.register(certificates := Certificates())
    tls = Authority().issue("penstock-frontend").write(folder).client()
    ClientCredentials(tls, field="coordinator.tls", certificates=certificates)
    failures = Failures(registry, "serving", time.monotonic)
    failures.failed(KubernetesError(Right.PATCH_PODS, "Forbidden", "it is"))
    return registry


def of_media() -> CollectorRegistry:
    """Return the metrics of a multimodal model."""
    registry = CollectorRegistry()
    metrics = MediaMetrics(registry, "model")
    metrics.series("penstock:media_seconds", "image", "fetch").observe(0.1)
    metrics.series("penstock:media_refused", "image", "MEDIA_TOO_LARGE").inc()
    return registry


def of_blocks() -> CollectorRegistry:
    """Return the metrics of engines that transfer KV blocks and states, and offload some of them to host memory."""
    registry, counts = CollectorRegistry(), TransferCounts()
    counts.moved("in", "grpc", 100)
    counts.moved("in", "grpc", 100, of_states=True)
    counts.ended(Transfer({}, KvMedium.HOST, "", 0.0, 1.0, 2, 1, 100, PART))
    tiers = TierStats(0.5, None, 1, 0, dict.fromkeys(KvMedium, 1), 100)
    ready = EngineReady(
        engine_id="e", incarnation="1", model="m", max_model_len=8, num_kv_blocks=4, block_size=16, vocab_size=9
    )
    stats, state = (
        SchedulerStats(kv_transfer=KvTransferStats()),
        EngineState(paused=False, sleep_level=0, num_nan_logits=0),
    )
    registry.register(Readings(lambda: tier_families(tiers, ready, tiers)))
    registry.register(Readings(lambda: transfer_families(counts, tiers, ready, tiers)))
    registry.register(EngineCollector(lambda: stats, lambda: state, Buckets([1.0]), ready, list))
    return registry


@pytest.mark.parametrize("source", ["rules", "dashboard", "pages"])
async def test_metrics_named_in_queries_are_exported(model: Path, source: str, tmp_path: Path) -> None:
    named = {"rules": queries.of_rules, "dashboard": queries.of_dashboard, "pages": queries.of_pages}[source]()
    async with started(model, adapters=True) as system:
        await used(system)
        registries = [registry for _, registry in system._registries]
        there = served([*registries, in_kubernetes(tmp_path / "tls"), of_media(), of_blocks()])
    there |= {metric: set(labels) for metric, labels in OF_PROMETHEUS.items()}
    assert len(named) > 3
    assert problems(named, there) == []


def test_a_metric_that_no_service_exports_is_found() -> None:
    there = {"up": {"job"}, "some:metric": {"engine"}}
    wrong = {
        "a": 'sum by (engin) (some:metric{job="x"})',
        "b": "rate(some_metric[5m])",
        "c": 'up{job="x",pod="y"} == 1',
    }
    assert problems(wrong, there) == [
        "a: some:metric has the label job",
        "a: no metric has the label engin",
        "b: nobody serves some_metric",
    ]
