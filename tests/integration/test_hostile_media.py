"""What nobody should send costs its own request alone."""

import asyncio
import gc
import logging
from collections import Counter

import pytest

from penstock_common.config.settings import Reread
from penstock_common.errors import RequestFailed
from penstock_frontend.call_types import EncodedFile, MediaPart
from penstock_frontend.config import LimitsConfig, MediaConfig
from penstock_frontend.metrics import FrontendMetrics, MediaMetrics
from penstock_frontend.processing.media.service import MediaService
from tests.fakes.hostile_media import Addresses, hostile
from tests.fakes.media_family import PlainFamily
from tests.fakes.media_files import image_file
from tests.fakes.patience import PATIENCE

REASONS = {"MEDIA_UNREADABLE", "MEDIA_TOO_LARGE", "MEDIA_NOT_ALLOWED", "MEDIA_FETCH_FAILED"}
AT_ONCE = 16
STORE_BYTES = 1024 * 1024


def check(number: int, part: MediaPart, error: RequestFailed) -> None:
    assert error.reason in REASONS, (number, error.reason, error.message)
    assert error.code in ("INVALID_ARGUMENT", "PERMISSION_DENIED", "FAILED_PRECONDITION"), (number, error.message)
    assert error.field.startswith(part.field), (number, error.field)
    assert len(error.message) < 1000, number
    assert "secret" not in error.message, (number, error.message)
    assert "passwd?" not in error.message, (number, error.message)


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_hostile_media_are_refused_and_leave_nothing(count: int, caplog: pytest.LogCaptureFixture) -> None:
    config = MediaConfig(
        workers=1,
        worker_timeout=PATIENCE,
        worker_memory=512 * 1024 * 1024,
        max_pixels=1_000_000,
        max_bytes=1_000_000,
        store_bytes=STORE_BYTES,
        allowed_domains=("images.test", "*.images.test"),
        allow_features=True,
    )
    service = MediaService(
        PlainFamily(),
        config,
        Reread(LimitsConfig()),
        MediaMetrics(FrontendMetrics("m").registry, "m"),
        resolver=Addresses(),
    )
    outcomes: Counter[str] = Counter()
    caplog.set_level(logging.DEBUG)
    try:
        await service.start()
        (first_worker,) = service.worker_pids
        numbers = iter(range(count))

        async def send() -> None:
            for number in numbers:
                part = hostile(number)
                try:
                    await service.prepare([part], cache_salt="", deadline=None)
                except RequestFailed as e:
                    check(number, part, e)
                    outcomes[e.reason] += 1
                else:  # a broken file may still be one that can be read
                    outcomes["taken"] += 1

        await asyncio.gather(*(send() for _ in range(AT_ONCE)))
        good = MediaPart(modality="image", source=EncodedFile(image_file()), field="good")
        (prepared,) = await service.prepare([good], cache_salt="", deadline=None)
        assert prepared.item.num_embeds > 0
        assert service.worker_pids == [first_worker]
        assert service.in_flight.num_bytes == 0
        assert service.store.num_bytes <= STORE_BYTES
        del prepared
        gc.collect()
        assert service.store.num_alive == len(service.store)
    finally:
        await service.close()
    assert outcomes.keys() == REASONS | {"taken"}
    assert outcomes["taken"] < count / 3
    assert "secret" not in caplog.text
