"""What operators are shown of an engine's speculation."""

from typing import Any

import msgspec

from penstock_common.types.outputs import SpecDecodingStats
from penstock_enginecore.config.speculative import SpeculativeConfig


def speculation_facts(
    config: SpeculativeConfig, stats: SpecDecodingStats | None, failure: str | None
) -> dict[str, Any] | None:
    """The method, its limit, why it was switched off (empty: it was not) and what it has brought; None without speculation."""
    if not config.enabled:
        return None
    return {
        "method": config.method,
        "model": config.model,
        "num_speculative_tokens": config.num_speculative_tokens,
        "failure": failure or "",
        **msgspec.structs.asdict(stats or SpecDecodingStats()),
    }
