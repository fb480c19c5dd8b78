"""Multimodal engines compared with transformers' ``generate``, in float32: prompts with images and text, with all
implementations.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForMultimodalLM

from penstock_common.types.request import EngineCoreRequest
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.models.errors import ModelLoadError
from tests.fakes.engines.in_process import Run, answer, build_engine
from tests.fakes.multimodal_models import IMAGE_FAMILIES, make_image, make_sound, save_multimodal_model
from tests.fakes.multimodal_prompts import MediaPrompt, PromptMaker

COUNT = 8
TEXT = "How many of the animals in the picture are asleep?"
PICTURES = make_image(40, 40, 1), make_image(70, 36, 2), make_image(30, 61, 3)
AUDIO = ("qwen2_audio", "voxtral")
OMNI = ("qwen2_5_omni", "qwen3_omni_moe")
"""Model types with images and sound in one prompt."""
FAMILIES = (*IMAGE_FAMILIES, *AUDIO)
SPANS = {"gemma3": 18, "gemma4": 72, "gemma4_unified": 72}
"""Number of tokens of the largest image, including the tokens around it, of model types that compute it in one step."""
RECURRENT = ("qwen3_5", "qwen3_5_moe")
"""Model types that need blocks of 16 tokens."""
SLIDING = ("gemma3", "gemma4", "gemma4_unified", "aya_vision")
"""Model types with two KV cache groups, which use one block pool."""
LONG_IMAGES = ("gemma4", "gemma4_unified")
"""Model types whose images are longer than their windows, so that windows save many blocks behind the prompt."""
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "decoder": {"cache": {"block_size": 16}},
    "decoder chunks": {"cache": {"block_size": 16}, "scheduler": {"max_num_batched_tokens": 7}},
    "chunks": {"scheduler": {"max_num_batched_tokens": 7}},
    "slices": {"scheduler": {"max_num_encoder_tokens": 1}},
    "reference": {"model": {"attention_backend": "reference"}, "kernels": {"isa": "off"}},
    "cpu": {"model": {"attention_backend": "cpu"}, "kernels": {"isa": "off"}},
    "async": {"scheduler": {"async_scheduling": True, "max_num_batched_tokens": 32}},
    "drafts": {"speculative": {"method": "ngram"}},
    "processes": {"executor": {"kind": "multiproc"}},
    "split": {"executor": {"tensor_parallel_size": 2}},
}
PROCESSES = ("processes", "split")
KINDS = (
    *("llava", "gemma3", "gemma4", "aya_vision", "llava_onevision"),
    *("qwen2_vl", "qwen2_audio", "qwen3_5", "glm4v"),
)
"""One model type of each kind.

The kinds are: square images, bidirectional attention within images, the same in layers with windows only, attention and
MLP with the same input, crops of any shape, grids, audio, recurrent layers, and rotary sections that the kernels do not
compute.
"""


class Case:
    """A model type's tiny checkpoint, its prompts, and transformers' tokens for the prompts."""

    def __init__(self, family: str, directory: Path) -> None:
        self.family = family
        self.path = directory
        model = save_multimodal_model(family, directory)
        make = PromptMaker(directory, model).make
        one, two, three = _items(family)
        self.prompts: dict[str, MediaPrompt] = {
            "two": make("Compare ", one, " with ", two, " please."),
            "text": make(TEXT),
            "last": make("Look: ", three),
            "three": make(two, one, "and", three, " are three."),
        }
        self.expected = {name: prompt.expected(COUNT) for name, prompt in self.prompts.items()}
        assert len({tuple(tokens) for tokens in self.expected.values()}) == len(self.prompts), (
            "images make no difference"
        )

    def requests(self, names: Sequence[str] = ()) -> list[EngineCoreRequest]:
        return [self.prompts[name].request(name, COUNT) for name in names or self.prompts]

    def engine(self, **sections: Any) -> EngineCore:
        span = SPANS.get(self.family, 0)
        if 0 < sections.get("scheduler", {}).get("max_num_batched_tokens", 0) < span:
            sections = {**sections, "scheduler": {**sections["scheduler"], "max_num_batched_tokens": span}}
        if self.family in RECURRENT:
            sections = {**sections, "cache": {**sections.get("cache", {}), "block_size": 16}}
        return build_engine(self.path, **sections)


def _items(family: str) -> tuple[Any, Any, Any]:
    if family in OMNI:  # equal lengths, because transformers pads sounds to the longest sound of a prompt
        return PICTURES[0], make_sound(1.2, 2), make_sound(1.2, 3)
    return (make_sound(0.5, 1), make_sound(1.2, 2), make_sound(1.9, 3)) if family in AUDIO else PICTURES


every_family = pytest.mark.parametrize("case", FAMILIES, indirect=True)
every_kind = pytest.mark.parametrize(
    "case",
    [family if family == "llava" else pytest.param(family, marks=pytest.mark.slow) for family in KINDS],
    indirect=True,
)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def run(engine: EngineCore, requests: Sequence[EngineCoreRequest], **options: Any) -> Run:
    try:
        return answer(engine, requests, **options)
    finally:
        engine.shutdown()


@pytest.mark.quick("llava", "qwen2_vl", "gemma3", "llava_pixtral", "qwen2_audio", "qwen3_5", "glm4v")
@every_family
def test_tokens_are_those_of_transformers_whatever_is_cut(case: Case) -> None:
    """Runs steps of seven tokens, with the modules and with the native decoder, and then again with cached prefixes."""
    for block_size in (4, 16):
        engine = case.engine(
            cache={"block_size": block_size}, scheduler={"max_num_batched_tokens": 7, "max_num_encoder_tokens": 1}
        )
        assert answer(engine, case.requests()).tokens == case.expected
        again = run(engine, case.requests())
        assert again.tokens == case.expected
        assert again.stats.prefix_cache_hits > 0


@pytest.mark.parametrize("case", ["qwen3_vl_moe"], indirect=True)
def test_the_native_decoder_computes_a_mixture_with_sections_and_deepstack(case: Case) -> None:
    engine = case.engine(**WAYS["decoder"])
    [info] = engine.executor.collective_rpc("worker_info")
    assert "kernels (decoder, attention, sampler)" in info["computing"]
    assert run(engine, case.requests()).tokens == case.expected


@every_kind
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow) if way in PROCESSES else way for way in WAYS]
)
def test_tokens_are_those_of_transformers(case: Case, way: str, request: pytest.FixtureRequest) -> None:
    if way in PROCESSES:
        request.getfixturevalue("warm_processes")
    assert run(case.engine(**WAYS[way]), case.requests()).tokens == case.expected


@every_kind
def test_prompts_that_are_cached_up_to_the_middle_of_an_image_go_on_from_there(case: Case) -> None:
    engine = case.engine(scheduler={"max_num_batched_tokens": 64})
    first = answer(engine, case.requests())
    again = answer(engine, case.requests())
    longer = case.prompts["two"].followed_by(case.prompts["text"].token_ids[:5])
    expected = longer.expected(COUNT)
    behind = run(engine, [longer.request("longer", COUNT)])
    assert first.tokens == again.tokens == case.expected
    assert behind.tokens["longer"] == expected
    assert again.stats.prefix_cache_hits > 0


@every_kind
def test_requests_that_lose_their_blocks_come_back(case: Case) -> None:
    count, copies = (6 * COUNT, 3) if case.family in LONG_IMAGES else (3 * COUNT, 2)
    prompts = {f"{name}{i}": prompt for i in range(copies) for name, prompt in case.prompts.items()}
    lengths = [len(prompt.token_ids) for prompt in prompts.values()]
    room = max(max(lengths) + count + 4, sum(lengths[:3]) + 20)  # enough for three prompts, but not for all requests
    blocks = (room // (16 if case.family in RECURRENT else 4) + 2) * (1 + (case.family in SLIDING))
    engine = case.engine(cache={"num_blocks": blocks, "enable_prefix_caching": False}, scheduler={"watermark": 0.0})
    found = run(engine, [prompt.request(name, count) for name, prompt in prompts.items()])
    assert found.stats.num_preemptions > 0
    expected = {name: prompt.expected(count) for name, prompt in case.prompts.items()}
    assert found.tokens == {name: expected[name[:-1]] for name in prompts}


@every_kind
def test_a_cache_that_holds_one_image_serves_prompts_with_several(case: Case) -> None:
    engine = case.engine(multimodal={"encoder_cache_size": 1}, cache={"enable_prefix_caching": False})
    assert run(engine, case.requests()).tokens == case.expected


@every_kind
def test_text_beside_images_has_the_bits_that_it_has_beside_text(case: Case) -> None:
    image, plain = case.prompts["two"], case.prompts["text"].request("text", COUNT, logprobs=0)
    text = MediaPrompt([token % 200 for token in image.token_ids], [], {}, None)
    engine = case.engine(cache={"enable_prefix_caching": False})
    # Caches the encoded image, which would otherwise be encoded during a step of the text request.
    answer(engine, [image.request("encoded", COUNT)])
    beside_image = answer(engine, [image.request("other", COUNT), plain])
    beside_text = run(engine, [text.request("other", COUNT), plain])
    assert beside_image.tokens["other"] == case.expected["two"] != beside_text.tokens["other"]
    assert beside_image.logprobs["text"] == beside_text.logprobs["text"]


@every_kind
def test_text_beside_images_has_the_bits_that_it_has_alone_where_kernels_see_to_that(case: Case) -> None:
    plain = case.prompts["text"].request("text", COUNT, logprobs=0)
    sections = {"kernels": {"batch_invariant": True}, "cache": {"block_size": 16}}
    if case.family == "glm4v" or case.family in RECURRENT:  # the kernels' decoder does not compute these types
        with pytest.raises(ModelLoadError, match=r"kernels\.batch_invariant is true"):
            case.engine(**sections)
        return
    alone = run(case.engine(**sections), [plain])
    beside = run(case.engine(**sections), [case.prompts["two"].request("two", COUNT), plain, *case.requests(["last"])])
    assert beside.tokens["two"] == case.expected["two"]
    assert beside.logprobs["text"] == alone.logprobs["text"]


@every_kind
@pytest.mark.parametrize("level", [1, 2])
def test_towers_sleep_with_the_model_and_rows_are_forgotten(case: Case, level: Any) -> None:
    engine = case.engine()
    before = answer(engine, case.requests())
    control = EngineControl(engine)
    control.sleep(level).result()
    [info] = engine.executor.collective_rpc("worker_info")
    assert (info["weight_bytes"] == 0) == (level == 2)
    control.wake_up()
    after = run(engine, case.requests())
    assert before.tokens == after.tokens == case.expected


@every_kind
def test_an_image_that_cannot_be_encoded_ends_its_own_request_alone(case: Case) -> None:
    engine = case.engine()
    broken = case.prompts["last"].request("broken", COUNT)
    [feature] = broken.mm_features
    data = {name: msgspec.structs.replace(tensor, data=tensor.data[:-1]) for name, tensor in feature.data.items()}
    bad = msgspec.structs.replace(feature, identifier="0" * 64, data=data)
    requests = [msgspec.structs.replace(broken, mm_features=[bad]), *case.requests()]
    found = run(engine, requests, refused={"broken"})
    assert {name: found.tokens[name] for name in case.expected} == case.expected


@every_kind
def test_the_text_model_alone_serves_text(case: Case) -> None:
    engine = case.engine(multimodal={"enabled": False})
    assert engine.model.media == ()
    assert run(engine, case.requests(["text"])).tokens["text"] == case.expected["text"]


@pytest.mark.slow
def test_each_sound_of_qwen3_asr_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Prompts have one sound, because transformers' processor accepts no more."""
    torch.set_num_threads(1)
    make = PromptMaker(tmp_path, save_multimodal_model("qwen3_asr", tmp_path)).make
    prompts = {
        f"{name}{seconds}": make(f"{name} ", make_sound(seconds, 1), " please.")
        for name in ("write", "say")
        for seconds in (0.3, 1.0, 1.9, 2.6)
    }
    expected = {name: prompt.expected(COUNT) for name, prompt in prompts.items()}
    assert len({tuple(tokens) for tokens in expected.values()}) == len(prompts), "sounds make no difference"
    requests = [prompt.request(name, COUNT) for name, prompt in prompts.items()]
    sections = {"cache": {"block_size": 4}, "scheduler": {"max_num_batched_tokens": 7, "max_num_encoder_tokens": 1}}
    engine = build_engine(tmp_path, **sections)
    assert answer(engine, requests).tokens == expected
    again = run(engine, requests)
    assert again.tokens == expected
    assert again.stats.prefix_cache_hits > 0


@pytest.mark.filterwarnings("ignore:.*per-frame pixel cap.*")
@pytest.mark.parametrize(
    "family",
    [
        *("llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
        *("glm4v", "glm46v"),
        *("gemma4", "gemma4_unified"),
    ],
)
def test_video_beside_images_gives_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    make = PromptMaker(tmp_path, save_multimodal_model(family, tmp_path)).make
    short, long = ([make_image(40, 40, first + i) for i in range(6)] for first in (1, 7))
    if family != "llava_onevision":  # transformers stacks llava_onevision's videos
        del short[4:]
    if family in SPANS:  # the largest number of frames of these checkpoints
        del long[4:]
    # transformers refuses prompts with images and videos for GLM's models
    other = short if family.startswith("glm") else PICTURES[0]
    prompts = {"video": make("Watch ", long, " now."), "both": make(other, " is none of ", short, " nor ", long)}
    expected = {name: prompt.expected(COUNT) for name, prompt in prompts.items()}
    requests = [prompt.request(name, COUNT) for name, prompt in prompts.items()]
    cache = {"block_size": 16}
    assert run(build_engine(tmp_path, cache=cache), requests).tokens == expected
    step = {"max_num_batched_tokens": SPANS.get(family, 7), "max_num_encoder_tokens": 1}
    cut = build_engine(tmp_path, cache=cache, scheduler=step)
    assert run(cut, requests).tokens == expected


@pytest.mark.parametrize("family", ["gemma4", pytest.param("gemma4_unified", marks=pytest.mark.slow)])
def test_bfloat16_gives_nearly_the_probabilities_of_transformers(family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    load: Any = AutoModelForMultimodalLM.from_pretrained
    rounded: Any = save_multimodal_model(family, tmp_path)
    rounded.to(torch.bfloat16).save_pretrained(tmp_path)
    model = load(tmp_path, dtype=torch.float32).eval()
    prompt = PromptMaker(tmp_path, model).make("Compare ", PICTURES[0], " with ", make_sound(0.7), PICTURES[1], ".")
    for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 0.1)):
        engine = build_engine(tmp_path, model={"dtype": dtype})
        found = run(engine, [prompt.request("one", COUNT, logprobs=0)])
        expected = prompt.logprobs_of(found.tokens["one"])
        assert found.logprobs["one"].logprobs == pytest.approx(expected, abs=tolerance)


LIKE_E4B = {
    "use_bidirectional_attention": None,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 512,
    "attention_k_eq_v": False,
}
"""Fields of Gemma 4 E2B and E4B: images attend to earlier tokens only, layers share keys, and have embeddings of tokens."""


@pytest.mark.parametrize("family", ["gemma4", pytest.param("gemma4_unified", marks=pytest.mark.slow)])
@pytest.mark.parametrize("attention", ["vision", None])
def test_sound_beside_images_gives_the_tokens_of_transformers(
    family: str, attention: str | None, tmp_path: Path
) -> None:
    """Sound attends to earlier tokens only, and so do images if the checkpoint does not say otherwise."""
    torch.set_num_threads(1)
    text = LIKE_E4B if attention is None and family == "gemma4" else {"use_bidirectional_attention": attention}
    make = PromptMaker(tmp_path, save_multimodal_model(family, tmp_path, text=text)).make
    one, two = make_sound(0.7, 1), make_sound(1.3, 2)
    prompts = {"sound": make("Hear ", one, " and ", two, "."), "both": make(PICTURES[0], " is ", one, PICTURES[2], two)}
    expected = {name: prompt.expected(COUNT) for name, prompt in prompts.items()}
    requests = [prompt.request(name, COUNT) for name, prompt in prompts.items()]
    assert run(build_engine(tmp_path), requests).tokens == expected
    step = {"max_num_batched_tokens": 7 if attention is None else SPANS[family], "max_num_encoder_tokens": 1}
    engine = build_engine(tmp_path, scheduler=step)
    assert answer(engine, requests).tokens == expected
    again = run(engine, requests)
    assert again.tokens == expected
    assert again.stats.prefix_cache_hits > 0
