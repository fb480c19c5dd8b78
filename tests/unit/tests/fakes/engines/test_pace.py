import pytest

from penstock_common.errors import ConfigError
from tests.fakes.engines.oracle_service.pace import Pace, pace_from


def test_without_variables_a_step_takes_what_a_small_model_takes():
    assert pace_from({"HOME": "/tmp"}) == Pace(step_seconds=0.02, load_seconds=0.0)


def test_each_variable_is_a_number_of_seconds():
    assert pace_from({"ORACLE_STEP_SECONDS": "0.5", "ORACLE_LOAD_SECONDS": "30"}) == Pace(0.5, 30.0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ORACLE_STEP_SECONDS", "fast", "ORACLE_STEP_SECONDS is 'fast'; it must be a number of seconds"),
        ("ORACLE_LOAD_SECONDS", "-1", "ORACLE_LOAD_SECONDS is -1.0; it must be 0 to 3600 seconds"),
        ("ORACLE_STEP_SECONDS", "nan", "ORACLE_STEP_SECONDS is nan; it must be 0 to 3600 seconds"),
        ("ORACLE_STEPS", "1", "ORACLE_STEPS is no variable of the oracle engine"),
    ],
)
def test_what_is_no_such_number_or_variable_is_refused_by_its_name(name: str, value: str, message: str):
    with pytest.raises(ConfigError, match="^" + message):
        pace_from({name: value})
