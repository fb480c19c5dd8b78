"""Memory left for the KV cache after embeddings of media."""

import msgspec
import pytest
import torch

from penstock_common.memory import Memory
from penstock_enginecore.config import (
    CacheConfig,
    EngineCoreConfig,
    KvTransferConfig,
    ModelConfig,
    MultimodalConfig,
    SchedulerConfig,
)
from penstock_enginecore.config.scheduler import STEP_TOKENS
from penstock_enginecore.core.model_info import MediaInfo, ModelInfo
from penstock_enginecore.executor import device
from penstock_enginecore.executor.device import (
    cpu_kv_cache_bytes,
    cuda_kv_cache_bytes,
    encoder_cache_bytes,
    staging_bytes,
)

CONFIG = EngineCoreConfig(model=ModelConfig(path="p"))
IMAGE = MediaInfo(modality="image", num_blocks=2, max_embeds=3000, max_tokens=3001)
MODEL = ModelInfo(max_len=4096, vocab_size=100, step_tokens=512, media=(IMAGE,), embed_bytes=10)


@pytest.mark.parametrize(
    ("fields", "embeds"),
    [
        ({}, 2 * STEP_TOKENS),
        ({"multimodal": MultimodalConfig(encoder_cache_size=5000)}, 5000),
        ({"multimodal": MultimodalConfig(encoder_cache_size=5)}, 3000),
        ({"scheduler": SchedulerConfig(max_num_batched_tokens=4000)}, 8000),
    ],
)
def test_the_encoder_cache_has_room_for_the_largest_item_at_least(fields: dict[str, object], embeds: int) -> None:
    config = msgspec.structs.replace(CONFIG, **fields)
    assert encoder_cache_bytes(config, MODEL) == 10 * embeds
    assert encoder_cache_bytes(config, msgspec.structs.replace(MODEL, media=())) == 0


def test_steps_that_a_large_image_makes_longer_keep_more_of_them() -> None:
    image = msgspec.structs.replace(IMAGE, max_span=3001)
    assert encoder_cache_bytes(CONFIG, msgspec.structs.replace(MODEL, media=(image,))) == 10 * 2 * 3001


@pytest.mark.parametrize(
    ("fields", "num_bytes"),
    [
        ({}, 0),
        ({"cache": CacheConfig(host_memory=1 << 30)}, 0),
        ({"cache": CacheConfig(host_memory=1 << 30, disk="d", disk_size=1 << 30)}, 32 << 20),
        ({"kv_transfer": KvTransferConfig(transport="grpc")}, 32 << 20),
        ({"kv_transfer": KvTransferConfig(transport="off", connector="package.module:Class")}, 32 << 20),
    ],
)
def test_copies_of_blocks_as_bytes_need_memory_of_the_device(fields: dict[str, object], num_bytes: int) -> None:
    assert staging_bytes(msgspec.structs.replace(CONFIG, **fields)) == num_bytes


def test_what_others_will_take_of_the_host_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "host_memory", lambda: Memory("host", 4000, 1000))
    assert [cpu_kv_cache_bytes(others) for others in (0, 200, 2000)] == [250, 200, 0]


@pytest.mark.parametrize(
    ("allocated", "reserved", "peak", "others", "left"),
    [
        (16, 16, 20, 0, 70),  # 16 GiB of weights, and 4 GiB more for a step
        (16, 25, 20, 0, 61),  # 9 GiB of holes that merged weights left
        (16, 25, 30, 0, 51),
        (16, 16, 20, 5, 65),  # another process
        (60, 95, 70, 0, 0),
    ],
)
def test_holes_of_the_allocator_are_not_offered_to_the_kv_cache(
    allocated: int, reserved: int, peak: int, others: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU of 100 GiB, of which the engine may use 90 GiB. Sizes are in GiB."""
    counts = {"memory_allocated": allocated, "memory_reserved": reserved, "max_memory_allocated": peak}
    for name, count in counts.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, count=count: count << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((100 - others - reserved) << 30, 100 << 30))
    config = CacheConfig(memory_utilization=0.9)
    assert cuda_kv_cache_bytes(config, torch.device("cuda", 0)) == left << 30
