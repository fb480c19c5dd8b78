"""coordinator/configmap.yaml and _config.tpl: values become settings, and the chart's own settings override them."""

from pathlib import Path

import msgspec

from penstock_common.config.sections import TracingConfig
from penstock_coordinator.config import CoordinatorConfig
from tests.chart.rendering import BARE, HUB, load, release


def test_settings_of_the_values_reach_the_coordinator(tmp_path: Path):
    settings = ("coordinator.config.lease_seconds=9", "coordinator.config.server.max_concurrent_streams=7")
    config = load(release(HUB, *settings), "coordinator", tmp_path)
    assert isinstance(config, CoordinatorConfig)
    assert (config.lease_seconds, config.server.max_concurrent_streams, config.server.port) == (9.0, 7, 50050)


def test_without_settings_the_coordinators_own_defaults_hold(tmp_path: Path):
    config = load(release(BARE), "coordinator", tmp_path)
    assert isinstance(config, CoordinatorConfig)
    own = CoordinatorConfig()
    assert (config.lease_seconds, config.view_interval, config.server) == (
        own.lease_seconds,
        own.view_interval,
        msgspec.structs.replace(own.server, host="::"),
    )
    assert (config.metrics.port, config.tracing) == (-1, TracingConfig())


def test_the_coordinator_is_told_nothing_that_is_not_its_own():
    config = release(HUB).config("coordinator")
    assert not {"model", "coordinator", "drain_timeout", "auth"} & config.keys()
