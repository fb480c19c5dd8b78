"""Configuration of a frontend process. Each section of settings is a struct, and ``FrontendConfig`` contains all
sections.
"""

from penstock_frontend.config.frontend import (
    CoordinatorClientConfig,
    DetectionConfig,
    FairnessConfig,
    FrontendConfig,
    RetriesConfig,
)
from penstock_frontend.config.http import HttpConfig, ResponsesConfig
from penstock_frontend.config.limits import AuthConfig, JwtConfig, LimitsConfig, MaxMediaConfig
from penstock_frontend.config.media import MediaConfig
from penstock_frontend.config.models import FurtherModelConfig, LoraConfig, ModelConfig
from penstock_frontend.config.routing import DisaggregationConfig, RoutingConfig, RoutingPolicy

__all__ = [
    "AuthConfig",
    "CoordinatorClientConfig",
    "DetectionConfig",
    "DisaggregationConfig",
    "FairnessConfig",
    "FrontendConfig",
    "FurtherModelConfig",
    "HttpConfig",
    "JwtConfig",
    "LimitsConfig",
    "LoraConfig",
    "MaxMediaConfig",
    "MediaConfig",
    "ModelConfig",
    "ResponsesConfig",
    "RetriesConfig",
    "RoutingConfig",
    "RoutingPolicy",
]
