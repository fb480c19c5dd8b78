"""The needs of settings that several services have."""

from penstock_common.config.needs import A_PORT, Need, Needs, When, on

OF_ALL: Needs = (
    Need(("metrics.host", "metrics.allowed_hosts", "metrics.tls."), (When(setting="metrics.port", off=A_PORT),)),
    Need(("tracing.sample_ratio", "tracing.service_name"), (on("tracing.endpoint"),)),
    Need(("log.prompts",), (on("log.requests"),)),
)
"""Those of every service."""
