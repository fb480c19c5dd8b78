"""Settings that result from the media flags, without a server."""

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from penstock_client import Model
from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig
from penstock_frontend.config import FrontendConfig, ModelConfig
from penstock_local import flags
from penstock_local.batch.options import BatchOptions
from penstock_local.bench.dataset import random_dataset
from penstock_local.bench.options import BenchOptions
from penstock_local.cli import build_parser
from penstock_local.commands.chat import Conversation, Turn
from penstock_local.media_files import MediaFile, read_media
from penstock_local.serving.machine_resources import free_ports
from penstock_local.serving.plan import check
from penstock_local.serving.serve_options import ServeOptions
from tests.fakes.composite_text_models import save_composite
from tests.unit.local.serving.test_plan import read, specs


def test_the_frontend_gets_what_the_flags_say_of_media(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "limit_mm_per_prompt": '{"image": 4, "video": 0}',
        "allowed_media_domains": "images.example.org, *.example.com",
        "media_workers": 3,
    }
    config = read(FrontendConfig, specs(**given)["frontend"], tmp_path)
    assert (config.limits.max_media.image, config.limits.max_media.audio, config.limits.max_media.video) == (4, 4, 0)
    assert config.media.allowed_domains == ("images.example.org", "*.example.com")
    assert config.media.workers == 3


@pytest.mark.parametrize(
    "given", [{"no_media": True}, {"settings": {"engine": {"multimodal.enabled": False}}}], ids=["flag", "setting"]
)
def test_engines_and_frontends_without_media_agree(tmp_path: Path, given: dict[str, Any]) -> None:
    processes = specs(**given)
    assert read(EngineCoreConfig, processes["engine-0"], tmp_path).multimodal.enabled is False
    assert read(FrontendConfig, processes["frontend"], tmp_path).media.enabled is False


@pytest.mark.parametrize(
    ("flag", "value"),
    [("limit_mm_per_prompt", '{"image": 1}'), ("allowed_media_domains", "example.org"), ("media_workers", 1)],
)
def test_flags_of_media_have_no_effect_without_media(flag: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} has no effect with --no-media"):
        specs(no_media=True, **{flag: value})


def test_a_checkpoint_with_unknown_encoders_needs_no_media(tmp_path: Path) -> None:
    save_composite("cohere2_vision", tmp_path)
    grpc, http, admin = free_ports(3)
    options: dict[str, Any] = {"grpc_port": grpc, "http_port": http, "admin_port": admin}
    check(ServeOptions(model=str(tmp_path), no_media=True, **options))
    with pytest.raises(ConfigError, match="Cohere2VisionForConditionalGeneration is not supported: .* use --no-media"):
        check(ServeOptions(model=str(tmp_path), **options))


def test_a_batch_without_media_loads_no_encoders() -> None:
    options = BatchOptions(input="a", output="b", model="m", no_media=True)
    assert options.engine_options == {"media": False}
    assert BatchOptions(input="a", output="b", model="m").engine_options == {}
    with pytest.raises(ConfigError, match="--no-media applies to an engine in this process"):
        BatchOptions(input="a", output="b", server=("http://x",), no_media=True)


def test_without_flags_the_frontends_own_hold(tmp_path: Path) -> None:
    config = read(FrontendConfig, specs()["frontend"], tmp_path)
    assert (config.media, config.limits) == (FrontendConfig(**_LEAST).media, FrontendConfig(**_LEAST).limits)


_LEAST: Any = {"model": ModelConfig(path="x"), "engines": ("a:1",)}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("4", "not a JSON object"),
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"smell": 1}', "'smell' is not a modality; known: image, audio, video"),
        ('{"image": -1}', "image is -1; it must be a number of items, 0 for none"),
        ('{"image": true}', "image is True"),
        ('{"image": "4"}', "image is '4'"),
        ('{"image": {"count": 4}}', "image is {'count': 4}"),
    ],
)
def test_a_limit_that_is_none_is_refused_with_the_flag(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=r"^--limit-mm-per-prompt ") as raised:
        specs(limit_mm_per_prompt=text)
    assert why in str(raised.value)


def test_media_keep_the_order_of_their_flags(tmp_path: Path) -> None:
    image, sound = tmp_path / "a.png", tmp_path / "b.wav"
    image.write_bytes(b"png")
    sound.write_bytes(b"wav")
    arguments = build_parser().parse_args(
        ["generate", "x", "--image", str(image), "--audio", str(sound), "--image", "https://example.org/c.png"]
    )
    first, second, third = flags.media(arguments)
    assert (first.modality, first.data) == ("image", b"png")
    assert (second.modality, second.data) == ("audio", b"wav")
    assert (third.modality, third.url, third.data) == ("image", "https://example.org/c.png", b"")
    assert flags.media(build_parser().parse_args(["generate", "x"])) == []


@pytest.mark.parametrize(
    ("name", "why"), [("none.png", "No such file"), (".", "Is a directory"), ("empty", "is empty")]
)
def test_a_file_that_cannot_be_sent_is_named(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    with pytest.raises(ConfigError, match=rf"^--image: .*{why}"):
        read_media(name, "image", of="--image")


def test_an_image_goes_with_the_next_message_alone(tmp_path: Path) -> None:
    conversation, file = Conversation(), MediaFile(modality="image", name="cat.png", data=b"png")
    conversation.show(file)
    conversation.ask("what is it?")
    conversation.answer("a cat")
    conversation.ask("sure?")
    first, _, second = conversation.messages
    assert (first.media, second.media) == ((file,), ())
    assert [part.WhichOneof("part") for part in first.message().parts] == ["media", "text"]
    assert second.message().content == "sure?"
    conversation.save(tmp_path / "c.json", model="m")
    assert '"media": [\n        "cat.png"\n      ]' in (tmp_path / "c.json").read_text(encoding="utf-8")
    conversation.show(file)
    conversation.clear()
    assert conversation.shown == ()


def test_a_message_without_media_is_as_it_was() -> None:
    message = Turn(role="user", content="hi").message()
    assert (message.content, len(message.parts)) == ("hi", 0)


MODEL = Model(name="m", max_model_len=4096, num_engines=1, vocab_size=100)


def test_random_prompts_have_images_that_repeat() -> None:
    options = BenchOptions(address="x", images=2, image_size="40x30", image_repeat=2, input_len="3")
    dataset = random_dataset(options, MODEL)
    first, again, other = (next(dataset.prompts).images for _ in range(3))
    assert first == again != other
    assert len(set(first)) == 2
    with Image.open(io.BytesIO(first[0])) as image:
        assert (image.format, image.size) == ("JPEG", (40, 30))
    assert dataset.about == "3 random token ids after 2 images of 40x30, the same for 2 requests"
    assert next(random_dataset(options, MODEL).prompts).images == first
    assert next(random_dataset(BenchOptions(address="x"), MODEL).prompts).images == ()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"images": 1, "image_size": "40"}, "--image-size 40: expected WxH"),
        ({"images": 1, "image_size": "axb"}, "--image-size axb: expected WxH"),
        ({"images": 1, "image_size": "0x4"}, "--image-size (a side)"),
        ({"image_size": "4x4"}, "--image-size is given, but --images is 0"),
        ({"image_repeat": 2}, "--image-repeat is given, but --images is 0"),
        ({"images": 1, "dataset": "prefix-repetition"}, "--images is for --dataset random"),
        ({"images": 1, "prompts": "f"}, "--images is for random prompts"),
    ],
)
def test_options_of_images_that_mean_nothing_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as raised:
        BenchOptions(address="x", **options)
    assert why in str(raised.value)
