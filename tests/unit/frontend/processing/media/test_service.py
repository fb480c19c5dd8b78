"""The media service and its cache: fetched media, limits, errors, and items that several requests share."""

import asyncio
import base64
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from penstock_common.config.settings import Reread
from penstock_common.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    PermissionDenied,
    RequestFailed,
    ResourceExhausted,
    Unavailable,
)
from penstock_common.types.media import EMBEDS, Modality, TensorData
from penstock_frontend.call_types import EncodedFile, Features, Frame, Frames, MediaPart, Source, Url
from penstock_frontend.config import LimitsConfig, MaxMediaConfig, MediaConfig
from penstock_frontend.metrics import FrontendMetrics, MediaMetrics
from penstock_frontend.processing.media.families.base import MediaPreparer, PreparedMedia, ProcessedItem
from penstock_frontend.processing.media.service import MediaService, MediaStore
from tests.fakes.media_family import PlainFamily
from tests.fakes.media_files import image_file, png, sound_file
from tests.fakes.network.file_server import FileServer, answer
from tests.fakes.patience import PATIENCE


class Made:
    """A media service and its metrics."""

    def __init__(self, limits: LimitsConfig, fault: str, settings: dict[str, Any]) -> None:
        self.metrics = FrontendMetrics("m")
        self.limits = Reread(limits)
        config = MediaConfig(**{"workers": 1, "worker_timeout": PATIENCE, "fetch_timeout": PATIENCE, **settings})

        async def resolver(host: str, port: int) -> list[str]:
            return ["127.0.0.1"]

        self.service = MediaService(
            PlainFamily(fault), config, self.limits, MediaMetrics(self.metrics.registry, "m"), resolver=resolver
        )

    async def prepare(self, *parts: MediaPart, salt: str = "", deadline: float | None = None) -> list[PreparedMedia]:
        preparer: MediaPreparer = self.service
        return await preparer.prepare(parts, cache_salt=salt, deadline=deadline)

    async def refused(self, *parts: MediaPart, **options: Any) -> RequestFailed:
        with pytest.raises(RequestFailed) as error:
            await self.prepare(*parts, **options)
        return error.value

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, {"model_name": "m", **labels}) or 0.0


Make = Callable[..., Made]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Made] = []

    def make(limits: LimitsConfig | None = None, fault: str = "", **settings: Any) -> Made:
        made.append(Made(limits or LimitsConfig(), fault, settings))
        return made[-1]

    yield make
    for each in made:
        await each.service.close()
        assert each.service.worker_pids == []
        assert each.service.in_flight.num_bytes == 0


def part(
    source: Source, modality: Modality = "image", field: str = "messages[0].content[1]", **kwargs: Any
) -> MediaPart:
    return MediaPart(modality=modality, source=source, field=field, processor_kwargs=kwargs)


def image(seed: int = 0, **kwargs: Any) -> MediaPart:
    return part(EncodedFile(image_file(seed=seed, size=(8, 6))), **kwargs)


def data_url(data: bytes) -> Url:
    return Url("data:image/png;base64," + base64.b64encode(data).decode())


async def test_media_come_in_their_order_with_their_names(make: Make) -> None:
    made = make()
    parts = [
        image(1),
        part(EncodedFile(sound_file()), "audio"),
        part(Frames([Frame(image_file(seed=n), n / 2) for n in range(2)]), "video"),
        part(data_url(image_file(seed=1, size=(8, 6)))),
    ]
    prepared = await made.prepare(*parts)
    assert [each.item.modality for each in prepared] == ["image", "audio", "video", "image"]
    assert prepared[0] == prepared[3]
    assert len({each.identifier for each in prepared}) == 3


async def test_no_worker_starts_before_there_are_media(make: Make) -> None:
    made = make()
    assert await made.prepare() == []
    assert made.service.worker_pids == []
    await made.prepare(image())
    assert len(made.service.worker_pids) == 1


async def test_the_same_image_is_decoded_once(make: Make) -> None:
    made = make()
    first = await asyncio.gather(*(made.prepare(image(1)) for _ in range(5)))
    again = await made.prepare(image(1))
    assert all(each[0].item is again[0].item for each in first)
    assert made.value("penstock:media_seconds_count", modality="image", stage="process") == 1
    assert (made.value("penstock:media_store_queries_total"), made.value("penstock:media_store_hits_total")) == (6, 5)
    assert made.value("penstock:media_store_bytes") == again[0].item.num_bytes


async def test_items_that_wait_for_a_worker_are_counted(make: Make) -> None:
    made = make()
    await made.service.start()
    preparing = [asyncio.create_task(made.prepare(image(seed, fault="hang"))) for seed in range(3)]
    while made.value("penstock:media_queued") != 2:
        await asyncio.sleep(0.01)
    for task in preparing:
        task.cancel()
    await asyncio.gather(*preparing, return_exceptions=True)


async def test_another_salt_shares_nothing(make: Make) -> None:
    made = make()
    one, other = [await made.prepare(image(1), salt=salt) for salt in ("a", "b")]
    assert one[0].identifier != other[0].identifier
    assert made.value("penstock:media_store_hits_total") == 0


async def test_other_arguments_of_the_processor_make_another_item(make: Make) -> None:
    made = make()
    one, other = await made.prepare(image(1), image(1, size=3))
    assert one.identifier != other.identifier


async def test_urls_of_one_request_are_fetched_at_once(make: Make) -> None:
    together = asyncio.Barrier(3)

    async def wait_for_all(writer: asyncio.StreamWriter) -> None:
        await together.wait()
        writer.write(answer(image_file()))

    async with FileServer() as server:
        server.answers["/a.png"] = wait_for_all
        made = make(allowed_domains=(f"*:{server.port}",), allowed_private_networks=("127.0.0.0/8",))
        url = part(Url(f"http://images.test:{server.port}/a.png"))
        assert len(await made.prepare(url, url, url)) == 3
    assert made.value("penstock:media_seconds_count", modality="image", stage="fetch") == 3


async def test_a_url_that_may_not_be_fetched_is_refused_before_anything_is(make: Make) -> None:
    async with FileServer() as server:
        made = make(allowed_domains=(f"images.test:{server.port}",), allowed_private_networks=("127.0.0.0/8",))
        good, bad = part(Url(f"http://images.test:{server.port}/")), part(Url("http://other.test/?secret"), field="b")
        error = await made.refused(good, bad)
        assert server.requests == []
    assert isinstance(error, PermissionDenied)
    assert (error.reason, error.field) == ("MEDIA_NOT_ALLOWED", "b")
    assert "secret" not in error.message
    assert made.service.worker_pids == []


@pytest.mark.parametrize("modality", ["image", "audio", "video"])
async def test_too_many_items_of_a_modality_are_refused_by_name(make: Make, modality: Modality) -> None:
    made = make(LimitsConfig(max_media=MaxMediaConfig(image=1, audio=1, video=1)))
    error = await made.refused(*(part(EncodedFile(b"x"), modality, field=f"parts[{n}]") for n in range(3)))
    assert (error.reason, error.field) == ("MEDIA_TOO_MANY", "parts[1]")
    assert error.message == f"the request has 3 {modality} items; limits.max_media.{modality} is 1"
    assert made.value("penstock:media_refused_total", modality=modality, reason="MEDIA_TOO_MANY") == 1


async def test_a_limit_that_is_read_anew_holds_from_then_on(make: Make) -> None:
    made = make()
    made.limits.now = LimitsConfig(max_media=MaxMediaConfig(image=0))
    assert (await made.refused(image())).reason == "MEDIA_TOO_MANY"


async def test_a_modality_that_the_model_does_not_take_is_refused(make: Make) -> None:
    made = make()
    made.service.family.modalities = frozenset({"image"})
    error = await made.refused(part(EncodedFile(sound_file()), "audio"))
    assert isinstance(error, InvalidArgument)
    assert "the model accepts image" in error.message


@pytest.mark.parametrize(
    ("source", "modality", "reason"),
    [
        (EncodedFile(b""), "image", "MEDIA_UNREADABLE"),
        (EncodedFile(b"BM" + bytes(100)), "image", "MEDIA_UNREADABLE"),
        (EncodedFile(b"<svg/>"), "image", "MEDIA_UNREADABLE"),
        (EncodedFile(sound_file()), "image", "MEDIA_UNREADABLE"),
        (EncodedFile(image_file()), "audio", "MEDIA_UNREADABLE"),
        (EncodedFile(image_file()), "video", "MEDIA_UNREADABLE"),
        (EncodedFile(image_file("JPEG", size=(64, 64))[:300]), "image", "MEDIA_UNREADABLE"),
        (EncodedFile(png(100_000, 100_000, b"")), "image", "MEDIA_TOO_LARGE"),
        (EncodedFile(bytes(100_001)), "image", "MEDIA_TOO_LARGE"),
        (EncodedFile(sound_file(seconds=2.0, rate=8000)), "audio", "MEDIA_TOO_LARGE"),
        (Frames([]), "video", "MEDIA_UNREADABLE"),
        (Frames([Frame(image_file(), 0.0)]), "image", "MEDIA_UNREADABLE"),
        (Frames([Frame(image_file(), 0.0), Frame(b"II*\0", 1.0)]), "video", "MEDIA_UNREADABLE"),
        (Frames([Frame(image_file(), 1.0), Frame(image_file(), 0.5)]), "video", "MEDIA_UNREADABLE"),
        (Frames([Frame(image_file(), float("nan"))]), "video", "MEDIA_UNREADABLE"),
        (Frames([Frame(image_file(), float("inf"))]), "video", "MEDIA_UNREADABLE"),
        (Frames([Frame(image_file(), -1.0)]), "video", "MEDIA_UNREADABLE"),
        (Frames([Frame(image_file(), 0.0), Frame(image_file(size=(6, 8)), 1.0)]), "video", "MEDIA_UNREADABLE"),
        (Frames([Frame(image_file(), 0.0)] * 4), "video", "MEDIA_TOO_LARGE"),
        (Url("data:image/png;base64,!!!!"), "image", "MEDIA_UNREADABLE"),
        (Url("data:image/png;base64," + "A" * 140_000), "image", "MEDIA_TOO_LARGE"),
        (Url("file:///etc/passwd"), "image", "MEDIA_NOT_ALLOWED"),
        (Url("https://example.org/a.png"), "image", "MEDIA_NOT_ALLOWED"),
        (Url("http://2130706433/"), "image", "MEDIA_UNREADABLE"),
        (Features({EMBEDS: TensorData("float32", (1, 1), bytes(4))}), "image", "MEDIA_NOT_ALLOWED"),
    ],
    ids=range(25),
)
async def test_what_cannot_be_taken_is_refused_by_its_field_and_reason(
    make: Make, source: Source, modality: Modality, reason: str
) -> None:
    made = make(max_bytes=100_000, max_frames=3, max_audio_seconds=1.5)
    error = await made.refused(part(source, modality, field="the.field"))
    assert (error.reason, error.field) == (reason, "the.field")
    assert error.message.startswith("the.field ")
    assert isinstance(error, PermissionDenied if reason == "MEDIA_NOT_ALLOWED" else InvalidArgument)
    assert made.value("penstock:media_refused_total", modality=modality, reason=reason) == 1


async def test_each_who_asks_for_a_broken_item_is_told_of_his_own_field(make: Make) -> None:
    made, broken = make(), EncodedFile(image_file(size=(64, 64))[:300])
    errors = await asyncio.gather(
        *(made.prepare(part(broken, field=f"field{n}")) for n in range(3)), return_exceptions=True
    )
    assert [getattr(error, "field", "") for error in errors] == ["field0", "field1", "field2"]


async def test_embeddings_are_taken_where_they_are_allowed(make: Make) -> None:
    made = make(allow_features=True)
    rows = TensorData("float32", (4, 2), np.ones((4, 2), np.float32).tobytes())
    (prepared,) = await made.prepare(part(Features({EMBEDS: rows})))
    assert (prepared.item.num_embeds, prepared.item.data[EMBEDS]) == (4, rows)


async def test_tensors_of_too_many_bytes_are_refused(make: Make) -> None:
    made = make(allow_features=True, max_bytes=100)
    error = await made.refused(part(Features({EMBEDS: TensorData("uint8", (101, 1), bytes(101))})))
    assert error.reason == "MEDIA_TOO_LARGE"


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"other": TensorData("float32", (1, 1), bytes(4))},
        {EMBEDS: TensorData("float32", (1, 1), b"\0\0\xc0\x7f")},
        {EMBEDS: TensorData("float32", (2, 2), bytes(4))},
    ],
    ids=range(4),
)
async def test_tensors_that_are_wrong_are_unreadable(make: Make, tensors: dict[str, TensorData]) -> None:
    error = await make(allow_features=True).refused(part(Features(tensors)))
    assert isinstance(error, InvalidArgument)
    assert error.reason == "MEDIA_UNREADABLE"


async def test_bytes_in_flight_are_bounded_and_given_back(make: Make) -> None:
    made = make(LimitsConfig(max_media_bytes_in_flight=300_000))
    large = image_file(size=(256, 256))
    await made.service.start()
    first = asyncio.create_task(made.prepare(part(EncodedFile(large), fault="hang")))
    while made.service.in_flight.num_bytes != len(large):
        await asyncio.sleep(0.01)
    error = await made.refused(part(EncodedFile(image_file(seed=1, size=(256, 256)))))
    assert isinstance(error, ResourceExhausted)
    assert error.retry_after is not None
    assert "limits.max_media_bytes_in_flight is 300000" in error.message
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert made.service.in_flight.num_bytes == 0


async def test_a_deadline_that_passes_ends_the_waiting(make: Make) -> None:
    made = make()
    await made.service.start()
    error = await made.refused(image(fault="hang"), deadline=time.time() + 0.2)
    assert isinstance(error, DeadlineExceeded)
    assert isinstance(await made.refused(image(), deadline=time.time() - 1), DeadlineExceeded)


@pytest.mark.parametrize("value", ["x" * 70_000, "\ud800", object()], ids=range(3))
async def test_arguments_beyond_reason_are_refused(make: Make, value: Any) -> None:
    error = await make().refused(image(size=value))
    assert isinstance(error, InvalidArgument)
    assert "xxx" not in error.message


@pytest.mark.parametrize("value", [10**30, 2**64, -(10**30), 1e308, [[[[]]]]], ids=str)
async def test_arguments_that_are_json_come_to_the_processor(make: Make, value: Any) -> None:
    assert len(await make().prepare(image(size=value))) == 1


async def test_a_processor_that_cannot_be_made_is_told_at_the_start(make: Make) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        await make(fault="no such file").service.start()


async def test_who_waits_for_the_first_worker_when_it_closes_is_told_so(make: Make) -> None:
    made = make()
    waiting = asyncio.create_task(made.prepare(image()))
    while not made.value("penstock:media_store_queries_total"):
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    await made.service.close()
    with pytest.raises(Unavailable):
        await waiting


async def test_after_closing_media_are_unavailable(make: Make) -> None:
    made = make()
    await made.prepare(image())
    running = asyncio.create_task(made.prepare(image(fault="hang")))
    await asyncio.sleep(0.1)
    await made.service.close()
    with pytest.raises(Unavailable):
        await running
    large = part(data_url(image_file(size=(512, 512))))
    for late in (image(2), large, part(Url("https://example.org/"))):
        assert isinstance(await made.refused(late), Unavailable)


def item(size: int = 10) -> ProcessedItem:
    return ProcessedItem(
        modality="image", data={"pixel_values": TensorData("uint8", (size,), bytes(size))}, num_embeds=3, layout=(1, 2)
    )


class Making:
    """Counts its calls. Waits for ``go`` if ``held`` is set."""

    def __init__(self, size: int = 10, *, held: bool = False, error: Exception | None = None) -> None:
        self.count = 0
        self.cancelled = 0
        self.go = asyncio.Event()
        self._size, self._error = size, error
        if not held:
            self.go.set()

    def __call__(self) -> Awaitable[ProcessedItem]:
        return self._make()

    async def _make(self) -> ProcessedItem:
        self.count += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self._error is not None:
            raise self._error
        return item(self._size)


def small_store(max_bytes: int, registry: CollectorRegistry | None = None) -> MediaStore:
    return MediaStore(max_bytes, MediaMetrics(registry or CollectorRegistry(), "m"))


def counted(registry: CollectorRegistry, name: str) -> float | None:
    return registry.get_sample_value(f"penstock:media_store_{name}", {"model_name": "m"})


async def test_an_item_is_made_once() -> None:
    store, making = small_store(100), Making()
    assert await store.get("a", making) is await store.get("a", making)
    assert making.count == 1


async def test_all_who_ask_at_once_get_what_is_made_once() -> None:
    store, making = small_store(100), Making(held=True)
    asking = [asyncio.create_task(store.get("a", making)) for _ in range(5)]
    await asyncio.sleep(0)
    making.go.set()
    first, *others = await asyncio.gather(*asking)
    assert making.count == 1
    assert all(other is first for other in others)


async def test_the_first_who_is_cancelled_does_not_cancel_the_others() -> None:
    store, making = small_store(100), Making(held=True)
    first, second = (asyncio.create_task(store.get("a", making)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    making.go.set()
    assert (await second).num_embeds == 3
    assert (making.count, making.cancelled) == (1, 0)


async def test_the_last_who_is_cancelled_ends_it_and_who_comes_then_begins_anew() -> None:
    store, making = small_store(100), Making(held=True)
    asking = [asyncio.create_task(store.get("a", making)) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    making.go.set()
    assert (await store.get("a", making)).num_embeds == 3
    assert (making.count, making.cancelled) == (2, 1)


async def test_all_who_ask_get_what_it_fails_with_and_nothing_is_kept_of_it() -> None:
    store, making = small_store(100), Making(error=ValueError("broken"))
    outcomes = await asyncio.gather(*(store.get("a", making) for _ in range(3)), return_exceptions=True)
    assert [str(each) for each in outcomes] == ["broken"] * 3
    with pytest.raises(ValueError, match="broken"):
        await store.get("a", making)
    assert making.count == 2
    assert (len(store), store.num_alive) == (0, 0)


async def test_the_least_recently_used_goes_when_there_is_no_room() -> None:
    store, makings = small_store(30), {name: Making() for name in "abcd"}
    for name in "abcad":
        await store.get(name, makings[name])
    assert (len(store), store.num_bytes) == (3, 30)
    for name in "acd":
        await store.get(name, makings[name])
    assert [making.count for making in makings.values()] == [1, 1, 1, 1]
    await store.get("b", makings["b"])
    assert makings["b"].count == 2


async def test_an_item_that_a_request_has_is_found_though_it_is_not_kept() -> None:
    store, making = small_store(10), Making()
    tensor = (await store.get("a", making)).data["pixel_values"]
    await store.get("b", Making())
    found = await store.get("a", making)
    assert found.data["pixel_values"] is tensor
    assert (found.layout, found.num_embeds) == ((1, 2), 3)
    assert making.count == 1


@pytest.mark.parametrize("max_bytes", [0, 9])
async def test_an_item_larger_than_all_the_room_is_found_while_somebody_has_it(max_bytes: int) -> None:
    store, making = small_store(max_bytes), Making()
    held = [await store.get("a", making), await store.get("a", making)]
    assert (making.count, store.num_bytes) == (1, 0)
    held.clear()
    await asyncio.sleep(0)  # the loop has what woke this up until then
    gc.collect()
    assert store.num_alive == 0
    await store.get("a", making)
    assert making.count == 2


async def test_nothing_is_left_of_items_that_nobody_has() -> None:
    store = small_store(20)
    for number in range(50):
        await store.get(str(number), Making())
    gc.collect()
    assert (len(store), store.num_alive, store.num_bytes) == (2, 2, 20)


async def test_after_clearing_an_item_is_made_anew() -> None:
    registry = CollectorRegistry()
    store, making = small_store(100, registry), Making()
    held = await store.get("a", making)
    sizes = [counted(registry, "bytes")]
    store.clear()
    sizes.append(counted(registry, "bytes"))
    assert (await store.get("a", making)) is not held
    assert making.count == 2
    assert [*sizes, counted(registry, "bytes")] == [10, 0, 10]


async def test_lookups_are_told_as_hits_where_it_is_there_or_in_the_making() -> None:
    registry = CollectorRegistry()
    store, making = small_store(100, registry), Making(held=True)
    asking: list[Callable[[], Awaitable[ProcessedItem]]] = [lambda: store.get("a", making)] * 2
    tasks = [asyncio.ensure_future(ask()) for ask in asking]
    await asyncio.sleep(0)
    making.go.set()
    await asyncio.gather(*tasks)
    assert [counted(registry, f"{name}_total") for name in ("queries", "hits")] == [2, 1]
    await store.get("a", making)
    await store.get("b", making)
    assert [counted(registry, f"{name}_total") for name in ("queries", "hits")] == [4, 2]
