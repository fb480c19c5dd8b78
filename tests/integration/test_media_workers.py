"""Media workers with a processor of transformers. Torch is installed, but no process imports torch."""

import asyncio
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from penstock_common.config.settings import Reread
from penstock_common.errors import RequestFailed
from penstock_common.rpc.loop import GrpcEventLoop
from penstock_frontend.call_types import EncodedFile, MediaPart, Url
from penstock_frontend.config import LimitsConfig, MediaConfig
from penstock_frontend.metrics import FrontendMetrics, MediaMetrics
from penstock_frontend.processing.media.service import MediaService
from tests.fakes.clip_family import ClipFamily
from tests.fakes.hostile_media import Addresses, hostile
from tests.fakes.media_family import PlainFamily
from tests.fakes.media_files import image_file
from tests.fakes.network.file_server import FileServer, answer
from tests.fakes.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


CONFIG = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 32},
    "crop_size": {"height": 32, "width": 32},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(CONFIG))
    return tmp_path


async def test_pixels_are_those_of_the_models_processor(folder: Path) -> None:
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    service = MediaService(
        ClipFamily(str(folder)),
        MediaConfig(workers=1, worker_timeout=PATIENCE),
        Reread(LimitsConfig()),
        MediaMetrics(FrontendMetrics("m").registry, "m"),
    )
    files = [image_file("PNG", size, seed=n) for n, size in enumerate([(40, 30), (33, 100), (32, 32), (7, 9)])]
    try:
        parts = [MediaPart(modality="image", source=EncodedFile(file), field="f") for file in files]
        prepared = await service.prepare(parts, cache_salt="", deadline=None)
    finally:
        await service.close()
    for size, made in zip([(40, 30), (33, 100), (32, 32), (7, 9)], prepared, strict=True):
        seed = prepared.index(made)
        image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8))
        expected = processor(images=[image], return_tensors="np", do_rescale=False, do_normalize=False)
        (name,) = made.item.data
        tensor = made.item.data[name]
        assert (name, tensor.dtype, tensor.shape) == ("pixel_values", "uint8", (1, 3, 32, 32))
        assert np.array_equal(np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape), expected["pixel_values"])


def with_tests() -> dict[str, str]:
    """Return environment variables with which media workers can import the model types of these tests.

    Media workers do not import from their working directory.
    """
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


def test_neither_the_frontend_nor_its_workers_load_torch(folder: Path) -> None:
    check = f"""
import asyncio, sys
import penstock_frontend.app.app
from penstock_common.config.settings import Reread
from penstock_frontend.config import LimitsConfig, MediaConfig
from penstock_frontend.metrics import FrontendMetrics
from penstock_frontend.metrics import MediaMetrics
from penstock_frontend.call_types import EncodedFile, MediaPart
from penstock_frontend.processing.media.service import MediaService
from tests.fakes.clip_family import ClipFamily
from tests.fakes.media_files import image_file

async def main():
    service = MediaService(
        ClipFamily({str(folder)!r}), MediaConfig(workers=1, worker_timeout=300.0), Reread(LimitsConfig()),
        MediaMetrics(FrontendMetrics("m").registry, "m"),
    )
    parts = [
        MediaPart(modality="image", source=EncodedFile(image_file()), field="f", processor_kwargs=kwargs)
        for kwargs in ({{}}, {{"modules": True}})
    ]
    _, loaded = await service.prepare(parts, cache_salt="", deadline=None)
    await service.close()
    in_worker = bytes(loaded.item.data["loaded"].data)
    return in_worker, sorted({{"torch", "torchvision", "transformers"}} & set(sys.modules))

import importlib.util
assert importlib.util.find_spec("torch") is not None
print(asyncio.run(main()))
"""
    run = subprocess.run(
        [sys.executable, "-c", check], env=with_tests(), capture_output=True, text=True, timeout=PATIENCE
    )
    assert run.stdout == "(b'\\x00', [])\n", run.stdout + run.stderr


def test_all_of_it_works_on_the_frontends_own_event_loop() -> None:
    async def resolver(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async def outcome(server: FileServer, path: str, **settings: float) -> str:
        """Run a media service and return the outcome. ``settings`` replace its timeouts, which are ``PATIENCE`` by
        default.
        """
        service = MediaService(
            PlainFamily(),
            MediaConfig(
                workers=1,
                worker_timeout=settings.get("worker_timeout", PATIENCE),
                fetch_timeout=settings.get("fetch_timeout", PATIENCE),
                allowed_domains=(f"*:{server.port}",),
                allowed_private_networks=("127.0.0.0/8",),
            ),
            Reread(LimitsConfig()),
            MediaMetrics(FrontendMetrics("m").registry, "m"),
            resolver=resolver,
        )
        path, _, fault = path.partition("#")
        url = Url(f"http://images.test:{server.port}/{path}")
        part = MediaPart(modality="image", source=url, field="f", processor_kwargs={"fault": fault})
        try:
            (prepared,) = await service.prepare([part], cache_salt="", deadline=None)
        except RequestFailed as e:
            return f"{e.code} {e.reason}"
        finally:
            await service.close()
        return str(prepared.item.num_bytes)

    async def main() -> list[str]:
        done = asyncio.Event()

        async def never(writer: asyncio.StreamWriter) -> None:
            await done.wait()

        async with FileServer() as server:
            server.answers |= {"/large": answer(image_file(size=(1000, 800))), "/slow": never}
            outcomes = [
                await outcome(server, "large"),
                await outcome(server, "large#kill"),
                await outcome(server, "large#hang", worker_timeout=0.2),
                await outcome(server, "slow", fetch_timeout=0.2),
                await outcome(server, "nowhere"),
            ]
            done.set()
            while server.num_open:
                await asyncio.sleep(0.01)
        return outcomes

    with asyncio.Runner(loop_factory=GrpcEventLoop) as runner:
        outcomes = runner.run(main())
    assert outcomes == [
        "2400000",
        "INVALID_ARGUMENT MEDIA_UNREADABLE",
        "INVALID_ARGUMENT MEDIA_TOO_LARGE",
        "FAILED_PRECONDITION MEDIA_FETCH_FAILED",
        "INVALID_ARGUMENT MEDIA_FETCH_FAILED",
    ]


@pytest.mark.parametrize("fault", ["", "spin"])
def test_workers_end_with_a_frontend_that_is_killed(fault: str) -> None:
    program = f"""
import asyncio
from penstock_common.config.settings import Reread
from penstock_frontend.config import LimitsConfig, MediaConfig
from penstock_frontend.metrics import FrontendMetrics
from penstock_frontend.metrics import MediaMetrics
from penstock_frontend.call_types import EncodedFile, MediaPart
from penstock_frontend.processing.media.service import MediaService
from tests.fakes.media_family import PlainFamily
from tests.fakes.media_files import image_file

async def main():
    service = MediaService(
        PlainFamily(), MediaConfig(workers=1), Reread(LimitsConfig()), MediaMetrics(FrontendMetrics("m").registry, "m")
    )
    await service.start()
    kwargs = {{"fault": {fault!r}}}
    part = MediaPart(modality="image", source=EncodedFile(image_file()), field="f", processor_kwargs=kwargs)
    busy = asyncio.create_task(service.prepare([part], cache_salt="", deadline=None))
    await asyncio.sleep(0.2)
    print(*service.worker_pids, flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""
    frontend = subprocess.Popen([sys.executable, "-c", program], env=with_tests(), stdout=subprocess.PIPE, text=True)
    assert frontend.stdout is not None
    with frontend, frontend.stdout:
        worker = int(frontend.stdout.readline())
        os.kill(worker, 0)
        frontend.send_signal(signal.SIGKILL)
        frontend.wait()
    until = time.monotonic() + PATIENCE
    while is_running(worker):
        assert time.monotonic() < until
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Return whether the process still runs. An ended process that was not reaped is a zombie and does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Malformed and hostile media fail only their own request.

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
                else:  # a damaged file may still be readable
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
