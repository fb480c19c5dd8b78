"""LoRA adapters as the operators' API tells of them."""

from penstock.admin.v1 import messages_pb2 as pb
from penstock_frontend.calls.adapters import AdapterInfo


def lora_info(info: AdapterInfo) -> pb.LoraInfo:
    """The message of what is known of an adapter."""
    adapter, held = info.adapter, info.held
    return pb.LoraInfo(
        name=adapter.name,
        path=adapter.path,
        digest=adapter.digest,
        rank=held.rank if held is not None else 0,
        modules=held.modules if held is not None else (),
        num_bytes=held.num_bytes if held is not None else 0,
        pinned=info.pinned,
        source=pb.LoraSource.ValueType(info.source),
        engine_ids=info.engine_ids,
    )
