import pytest

from penstock_common.errors import InvalidArgument
from penstock_coordinator.autoscaling import Targets
from penstock_coordinator.config import ScalingConfig
from penstock_coordinator.rpc.external_scaler import ScalerMetadata, scaler_metadata

DEFAULTS = ScalingConfig(target_load=0.7, target_kv_usage=0.9, slots=64, idle_seconds=60.0)


def test_what_is_left_out_is_the_coordinators():
    assert scaler_metadata({}, DEFAULTS) == ScalerMetadata(
        pool="default", targets=Targets(load=0.7, kv_cache_usage=0.9, slots=64), idle_seconds=60.0
    )


def test_everything_can_be_said_and_what_is_kedas_own_is_passed_over():
    texts = {
        "scalerAddress": "coordinator:50050",
        "enableTLS": "true",
        "futureKeyOfKeda": "x",
        "pool": "spot",
        "targetLoad": "1.5",
        "targetKvUsage": "0.5",
        "slots": "8",
        "idleSeconds": "0",
    }
    assert scaler_metadata(texts, DEFAULTS) == ScalerMetadata(
        pool="spot", targets=Targets(load=1.5, kv_cache_usage=0.5, slots=8), idle_seconds=0.0
    )


@pytest.mark.parametrize(
    ("key", "value", "limits"),
    [
        ("targetLoad", "0", "from 0.01 to 100"),
        ("targetLoad", "nan", "from 0.01 to 100"),
        ("targetLoad", "", "from 0.01 to 100"),
        ("targetKvUsage", "1.1", "from 0.01 to 1"),
        ("targetKvUsage", "80%", "from 0.01 to 1"),
        ("slots", "0", "from 1 to 65536"),
        ("slots", "inf", "from 1 to 65536"),
        ("idleSeconds", "-1", "from 0 to 86400"),
        ("idleSeconds", "5m", "from 0 to 86400"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_its_limits(key, value, limits):
    with pytest.raises(InvalidArgument) as e:
        scaler_metadata({key: value}, DEFAULTS)
    assert e.value.field == f"scalerMetadata.{key}"
    assert e.value.message == f"scalerMetadata.{key} is {value!r}; it must be a number {limits}"


def test_slots_are_whole():
    with pytest.raises(InvalidArgument, match=r"slots is 2.5; it must be an integer"):
        scaler_metadata({"slots": "2.5"}, DEFAULTS)


@pytest.mark.parametrize(
    ("key", "meant"), [("targetload", "targetLoad"), ("idleSecond", "idleSeconds"), ("Pool", "pool")]
)
def test_a_misspelt_key_is_refused(key, meant):
    with pytest.raises(InvalidArgument, match=rf"scalerMetadata\.{key} is not known; did you mean '{meant}'\?"):
        scaler_metadata({key: "1"}, DEFAULTS)
