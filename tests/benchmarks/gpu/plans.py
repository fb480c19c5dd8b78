"""Plans of measurements, by the names of shapes on the command line."""

from tests.benchmarks.gpu.shapes import FULL, SMALL, SMOKE, Plan
from tests.device.phases import Settings

PLANS: dict[str, Plan] = {"8B": FULL, "1B": SMALL, "tiny": SMOKE}


def plan_of(settings: Settings) -> Plan:
    """Return the plan of a run."""
    return PLANS[settings.shape]
