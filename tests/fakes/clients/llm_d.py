"""What llm-d's routing sidecar says to the server of a prompt."""

from typing import Any

PREFILL_PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Its ``kv_transfer_params``."""
