"""Prompts with images, audio and embeddings that resume on another engine or load their KV blocks from host memory.

Tokens equal those of one engine. Only missing blocks are transferred. Media whose blocks were transferred are not
encoded again.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock_common.types.outputs import EngineCoreOutput
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from tests.fakes.engines.handing_over import go_on, hand_over, tokens_of
from tests.fakes.engines.in_process import answer, build_engine
from tests.fakes.engines.transferring_engine import TransferringEngine
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.multimodal_models import make_image, make_sound, save_multimodal_model
from tests.fakes.multimodal_prompts import MediaPrompt, PromptMaker

BLOCK = 4
COUNT = 8
AFTER = 3
"""Number of tokens before a request is handed over."""
FAMILIES = ("llava", "qwen2_vl", "gemma3", "qwen2_audio")
"""Model types: a plain one, one with 3D positions, one with windows and unsplit images, and one for audio."""
HIDDEN = 48


class Case:
    """A model type's tiny checkpoint, two prompts, and transformers' tokens for the prompts."""

    def __init__(self, family: str, directory: Path) -> None:
        self.family, self.path = family, directory
        make = PromptMaker(directory, save_multimodal_model(family, directory)).make
        one, two = (
            (make_sound(0.5, 1), make_sound(1.2, 2))
            if family == "qwen2_audio"
            else (make_image(40, 40, 1), make_image(70, 36, 2))
        )
        self.prompts = {
            "first": make("Compare ", one, " with ", two, " please, and say which of both is larger."),
            "last": make("Look: ", two),
        }
        self.expected = {name: prompt.expected(COUNT) for name, prompt in self.prompts.items()}

    def request(self, name: str, **more: Any) -> EngineCoreRequest:
        return msgspec.structs.replace(self.prompts[name].request(name, COUNT), **more)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def encoded(core: EngineCore) -> int:
    media = core.scheduler.stats().media
    return 0 if media is None else media.encoded_embeds


def num_embeds(prompt: MediaPrompt, start: int = 0) -> int:
    """Return the number of embeddings of the items that end after position ``start``."""
    return sum(feature.num_embeds for feature in prompt.features if feature.end > start)


def handed_over(
    source: TransferringEngine, target: TransferringEngine, request: EngineCoreRequest
) -> tuple[list[int], list[EngineCoreOutput]]:
    """Hand a request over. Returns the tokens of both engines in order, and the outputs of the second engine."""
    prior, given = hand_over(source, request, AFTER)
    rest = go_on(target, request, prior, given)
    return prior + tokens_of(rest), rest


def moved(engine: TransferringEngine, direction: str) -> float:
    return engine.value("penstock:kv_transfer_blocks_total", direction=direction)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
def test_media_go_on_without_being_encoded_again(case: Case, ends: ExitStack, transport: str) -> None:
    source, target = (
        TransferringEngine(case.path, name, ends, kv_transfer={"transport": transport, "arena": 4 << 20})
        for name in "ab"
    )
    had = 0
    for name, prompt in case.prompts.items():
        together, rest = handed_over(source, target, case.request(name))
        assert together == case.expected[name]
        stats = next(output.prefill_stats for output in rest if output.prefill_stats is not None)
        cached = stats.num_cached_tokens
        assert stats.num_peer_tokens == cached > 0
        computed = num_embeds(prompt, cached)
        assert encoded(target.core) - had == computed, "items whose blocks had come were encoded, or others were not"
        assert computed == 0 or name == "last"
        had += computed
        assert moved(source, "out") == moved(target, "in")
        if case.family != "gemma3":  # gemma3 moves only the blocks inside its windows
            whole = (len(prompt.token_ids) + AFTER - 1) // BLOCK
            assert moved(target, "in") == whole or name == "last"
    assert target.value("penstock:kv_transfer_failures_total") == 0
    assert target.num_free_blocks == 199


@pytest.mark.slow
def test_another_image_at_the_same_place_takes_no_blocks_of_it(case: Case, ends: ExitStack) -> None:
    source, target = (TransferringEngine(case.path, name, ends) for name in "ab")
    request = case.request("last")
    _, given = hand_over(source, request, AFTER)
    [feature] = request.mm_features
    inverted = {
        name: msgspec.structs.replace(tensor, data=bytes(tensor.data)[::-1]) if tensor.dtype == "uint8" else tensor
        for name, tensor in feature.data.items()
    }
    other = msgspec.structs.replace(feature, identifier="0" * 64, data=inverted)
    again = msgspec.structs.replace(request, mm_features=[other], kv_source=given, attempt=1)
    found = target.run(again)["last"]
    alone = source.run(msgspec.structs.replace(request, mm_features=[other]))["last"]
    assert tokens_of(found) == tokens_of(alone)
    if case.family != "gemma3":  # the gemma3 source has already freed the blocks outside its windows
        assert moved(target, "in") == feature.offset // BLOCK
    assert encoded(target.core) == feature.num_embeds


MOST_TURNS = 10
"""Maximum number of turns in which blocks come back from host or disk twice."""


@pytest.mark.slow
@pytest.mark.parametrize("disk", [False, True], ids=["host", "disk"])
def test_media_come_back_from_the_host_and_the_disk(case: Case, disk: bool, tmp_path: Path) -> None:
    groups = 2 if case.family == "gemma3" else 1
    longest = max(len(prompt.token_ids) for prompt in case.prompts.values()) + COUNT
    cache: dict[str, Any] = {
        "block_size": BLOCK,
        "num_blocks": (longest // BLOCK + 3) * groups + 2,
        "host_memory": 16 << 20,
        "min_load_tokens": 4,
    }
    if disk:
        cache |= {"host_memory": 64 << 10, "disk": str(tmp_path), "disk_size": 16 << 20}
    engine = build_engine(case.path, cache=cache, scheduler={"watermark": 0.0})
    came_back = 0
    try:
        # The small host memory drops blocks that a slow disk has not written yet, so some turns may find no blocks.
        for turn in range(MOST_TURNS):
            before, hits = encoded(engine), engine.scheduler.kv_cache.external_stats.hits
            for name in case.prompts:
                assert answer(engine, [case.request(name)]).tokens[name] == case.expected[name]
                settle(engine)
                answer(engine, [filler(2 * turn + (name == "last"), longest - COUNT)])
                settle(engine)
            engine.scheduler.reset_encoder_cache()
            if engine.scheduler.kv_cache.external_stats.hits > hits:
                came_back += 1
                assert encoded(engine) - before < sum(map(num_embeds, case.prompts.values()))
            if came_back == 2:
                break
    finally:
        engine.shutdown()
    assert came_back == 2


def filler(number: int, length: int) -> EngineCoreRequest:
    """Return a request that evicts other requests' blocks from the pool."""
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=0.0)
    ids = [3 + (position * 7 + number * 5) % 190 for position in range(length)]
    return EngineCoreRequest(request_id="filler", prompt_token_ids=ids, sampling_params=params)


def settle(engine: EngineCore) -> None:
    """Step until no copy is pending."""
    while engine.has_work:
        engine.step(lambda: None)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vectors") / "llama"
    save_tiny_model("llama", path)
    return path


def prompt_of_vectors(*, mixed: bool) -> EngineCoreRequest:
    count = 45
    is_token = bytes(position % 3 == 1 for position in range(count)) if mixed else b""
    rows = torch.randn(count - sum(is_token), HIDDEN, generator=torch.Generator().manual_seed(3))
    embeds = PromptEmbeds(
        dtype="float32",
        num_tokens=count,
        hidden_size=HIDDEN,
        data=rows.numpy().tobytes(),
        is_token=is_token,
    )
    ids = [5 + position if mixed and is_token[position] else 0 for position in range(count)]
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=0.0, logprobs=1)
    return EngineCoreRequest(request_id="r", prompt_token_ids=ids, prompt_embeds=embeds, sampling_params=params)


@pytest.mark.parametrize("mixed", [False, True])
def test_prompts_of_vectors_go_on_with_their_blocks(llama: Path, ends: ExitStack, mixed: bool) -> None:
    source, target = (TransferringEngine(llama, name, ends) for name in "ab")
    request = prompt_of_vectors(mixed=mixed)
    whole = tokens_of(source.run(request)["r"])
    source.core.scheduler.reset_prefix_cache()
    together, rest = handed_over(source, target, request)
    assert together == whole
    blocks = (len(request.prompt_token_ids) + AFTER - 1) // BLOCK
    assert moved(source, "out") == moved(target, "in") == blocks
    stats = next(output.prefill_stats for output in rest if output.prefill_stats is not None)
    assert stats.num_peer_tokens == min(blocks * BLOCK, len(request.prompt_token_ids))
    assert target.value("penstock:kv_transfer_failures_total") == 0
