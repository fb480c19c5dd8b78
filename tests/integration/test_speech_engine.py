"""Whisper engines compared with transformers, with tiny random weights and 1500 outputs of the encoder."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock_common.errors import ConfigError, InvalidArgument
from penstock_common.types.outputs import FinishReason
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.speech_settings import check_speech
from penstock_enginecore.kv_transfer.core.transfer_stats import ComputeRate
from penstock_enginecore.models.errors import ModelLoadError
from tests.fakes.engines.handing_over import go_on, hand_over, tokens_of
from tests.fakes.engines.in_process import CLIENT, Run, answer, build_engine, config_of
from tests.fakes.engines.poisoned_pool import PoisonedPool
from tests.fakes.engines.transferring_engine import TransferringEngine
from tests.fakes.models.speech_models import SOUND_POSITIONS, SpeechPrompt, SpeechPrompts, save_speech_model
from tests.fakes.multimodal_models import make_sound
from tests.integration.test_kv_tiers import copy_at_once

COUNT = 12
BEGIN = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
TIMED = "<|startoftranscript|><|de|><|translate|>"
SOUND_BLOCKS = SOUND_POSITIONS // 16
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 190, "max_num_encoder_tokens": 1}},
    "small blocks": {"cache": {"block_size": 4, "num_blocks": 4096}},
    "large blocks": {"cache": {"block_size": 32}},
    "reference": {"model": {"attention_backend": "reference"}, "kernels": {"isa": "off"}},
    "cpu": {"model": {"attention_backend": "cpu"}, "kernels": {"isa": "off"}},
    "async": {"scheduler": {"async_scheduling": True}},
    "torch linear": {"kernels": {"linear": False}},
}


class Case:
    """A tiny checkpoint, its prompts, and transformers' tokens for the prompts."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.path = directory
        make = SpeechPrompts(directory, save_speech_model(directory, **settings)).make
        short, long = make_sound(3.0, 1), make_sound(29.5, 2)
        self.prompts: dict[str, SpeechPrompt] = {
            "short": make(short, BEGIN),
            "long": make(long, BEGIN),
            "previous": make(long, f"<|startofprev|> hello world{BEGIN}"),
            "timed": make(short, TIMED),
        }
        self.expected = {name: prompt.expected(COUNT) for name, prompt in self.prompts.items()}
        assert len({tuple(tokens) for tokens in self.expected.values()}) == len(self.prompts), (
            "sounds make no difference"
        )

    def requests(self, names: Sequence[str] = (), **params: Any) -> list[EngineCoreRequest]:
        return [self.prompts[name].request(name, COUNT, **params) for name in names or self.prompts]

    def engine(self, **sections: Any) -> EngineCore:
        cache = {"block_size": 16, "num_blocks": 640, **sections.pop("cache", {})}
        return build_engine(self.path, cache=cache, **sections)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    return Case(tmp_path_factory.mktemp("whisper"))


def run(engine: EngineCore, requests: Sequence[EngineCoreRequest], **options: Any) -> Run:
    try:
        return answer(engine, requests, **options)
    finally:
        engine.shutdown()


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_transformers(case: Case, way: str) -> None:
    """The second round finds the sounds, and most of the texts, in the prefix cache."""
    engine = case.engine(**WAYS[way])
    assert answer(engine, case.requests()).tokens == case.expected
    media = engine.scheduler.stats().media
    again = run(engine, case.requests())
    assert again.tokens == case.expected
    assert again.stats.prefix_cache_hits >= 4 * SOUND_POSITIONS
    assert media is not None
    assert again.stats.media is not None
    assert again.stats.media.encoded_embeds == media.encoded_embeds == 2 * 1500


def test_tokens_are_those_of_generate(case: Case) -> None:
    """``generate`` itself chooses the tokens of the prompt and the rules. It may continue after a timestamp."""
    names = ("short", "long")
    found = run(case.engine(), case.requests(names, ignore_eos=False)).tokens
    for name in names:
        model: Any = case.prompts[name].model
        features = case.prompts[name].features
        whole = model.generate(features, max_new_tokens=COUNT, language="en", task="transcribe")[0].tolist()
        begin = len(case.prompts[name].text) if whole[0] == case.prompts[name].text[0] else 0
        assert found[name] == whole[begin : begin + COUNT]


def test_log_probabilities_are_those_of_transformers(case: Case) -> None:
    found = run(case.engine(), case.requests(logprobs=0))
    for name, prompt in case.prompts.items():
        tokens = found.tokens[name]
        logits = prompt.logits(tokens)[len(prompt.text) - 1 : -1].log_softmax(-1)
        wanted = [float(row[token]) for row, token in zip(logits, tokens, strict=True)]
        assert list(found.logprobs[name].logprobs) == pytest.approx(wanted, abs=2e-3)


def test_a_request_uses_the_blocks_of_the_sound_and_of_its_text(case: Case) -> None:
    engine = case.engine(cache={"enable_prefix_caching": False})
    assert [(group.first_block, group.end_block) for group in engine.kv_cache_config.groups] == [
        (0, SOUND_BLOCKS),
        (SOUND_BLOCKS, None),
    ]
    pool = engine.scheduler.kv_cache.pool
    used = []
    run(engine, case.requests(["short"]), after_step=lambda: used.append(pool.num_usable_blocks - pool.num_free_blocks))
    assert max(used) == SOUND_BLOCKS + 1
    assert used[-1] == 0


def test_preempted_requests_continue_with_their_tokens(case: Case) -> None:
    """The pool has room for three sounds, but not for three whole texts."""
    count = 50
    prompts = [case.prompts[name] for name in ("short", "long", "timed")]
    expected = [prompt.expected(count) for prompt in prompts]
    engine = case.engine(cache={"num_blocks": 3 * SOUND_BLOCKS + 9, "enable_prefix_caching": False})
    found = run(engine, [prompt.request(str(number), count) for number, prompt in enumerate(prompts)])
    assert found.stats.num_preemptions > 0
    assert list(found.tokens.values()) == expected


def test_an_answer_that_was_cut_at_any_token_resumes(case: Case) -> None:
    engine = case.engine(cache={"enable_prefix_caching": False})
    prompt, whole = case.prompts["previous"], case.expected["previous"]
    requests = [prompt.request(str(number), COUNT, prior=whole[:number]) for number in range(1, COUNT)]
    found = run(engine, requests)
    assert found.tokens == {str(number): whole[number:] for number in range(1, COUNT)}


def test_no_position_that_a_request_must_not_read_reaches_it(case: Case) -> None:
    engine = case.engine(cache={"num_blocks": 320}, scheduler={"max_num_batched_tokens": 1100})
    pool = PoisonedPool(engine)
    assert answer(engine, case.requests()).tokens == case.expected
    assert run(engine, case.requests()).tokens == case.expected
    assert pool.steps > COUNT


@pytest.mark.slow
def test_drawn_and_constrained_tokens_do_not_depend_on_other_requests(case: Case) -> None:
    drawn = case.prompts["short"].request("drawn", COUNT, temperature=1.0, seed=3)
    regex = StructuredOutput(regex="[a-f]{2,4}-[0-9]{5}")
    bound = case.prompts["long"].request("bound", 20, ignore_eos=False, structured_output=regex)
    engine = case.engine()
    alone = {name: tokens for each in (drawn, bound) for name, tokens in answer(engine, [each]).tokens.items()}
    text = SpeechPrompts(case.path, case.prompts["long"].model).tokenizer.decode(alone["bound"])
    assert text[-6] == "-"
    together = run(engine, [drawn, *case.requests(), bound])
    assert {name: together.tokens[name] for name in alone} == alone
    assert len(set(alone["drawn"])) > 2


def test_the_longest_text_ends_at_the_last_position_of_the_decoder(case: Case) -> None:
    prompt = case.prompts["short"]
    full = msgspec.structs.replace(prompt.request("full", 50))
    text = (list(prompt.text) * 112)[:440]
    full = msgspec.structs.replace(full, prompt_token_ids=full.prompt_token_ids[:SOUND_POSITIONS] + text)
    engine = case.engine()
    assert engine.max_model_len == SOUND_POSITIONS + 448
    found = answer(engine, [full])
    assert len(found.tokens["full"]) == 8
    assert found.finish_reasons["full"] is FinishReason.LENGTH
    longer = msgspec.structs.replace(full, prompt_token_ids=full.prompt_token_ids + text[:8])
    with pytest.raises(InvalidArgument, match="at most 1951 leave room for one output token"):
        engine.preprocess(CLIENT, longer)
    engine.shutdown()


@pytest.mark.parametrize("level", [1, 2])
def test_the_model_sleeps_with_its_encoder(case: Case, level: Any) -> None:
    engine = case.engine()
    assert answer(engine, case.requests(["short"])).tokens["short"] == case.expected["short"]
    control = EngineControl(engine)
    control.sleep(level).result()
    control.wake_up()
    assert run(engine, case.requests()).tokens == case.expected


def test_blocks_of_the_sound_come_back_from_host_memory(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ComputeRate, "pays", lambda *_: True)
    cache = {"num_blocks": SOUND_BLOCKS + 40, "host_memory": 16 << 20, "min_load_tokens": 1}
    engine = case.engine(cache=cache, model={"max_model_len": SOUND_POSITIONS + 100})
    copy_at_once(engine, monkeypatch)
    for _ in range(2):
        for name in ("short", "long"):
            assert answer(engine, case.requests([name])).tokens == {name: case.expected[name]}
    assert engine.scheduler.kv_cache.external_stats.hits >= SOUND_POSITIONS
    engine.shutdown()


def test_another_engine_resumes_with_the_blocks_of_the_sound(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ComputeRate, "pays", lambda *_: True)
    with ExitStack() as ends:
        cache = {"block_size": 16, "num_blocks": 400, "min_load_tokens": 1}
        source, target = (TransferringEngine(case.path, name, ends, cache=cache) for name in "ab")
        [request] = case.requests(["previous"])
        prior, given = hand_over(source, request)
        rest = go_on(target, request, prior, given)
        assert prior + tokens_of(rest) == case.expected["previous"]
        stats = next(output.prefill_stats for output in rest if output.prefill_stats is not None)
        assert stats.num_peer_tokens >= SOUND_POSITIONS
        assert target.core.scheduler.stats().media is not None
        assert target.core.scheduler.stats().media.encoded_embeds == 0


def test_an_english_only_checkpoint_with_fewer_decoder_layers_and_more_bins(tmp_path: Path) -> None:
    model = save_speech_model(tmp_path, english_only=True, num_mel_bins=128, decoder_layers=1)
    prompt = SpeechPrompts(tmp_path, model).make(make_sound(2.0, 3), "<|startoftranscript|><|notimestamps|>")
    expected = prompt.expected(6)
    assert run(build_engine(tmp_path, cache={"block_size": 16}), [prompt.request("a", 6)]).tokens["a"] == expected


def test_a_broken_sound_ends_only_its_own_request(case: Case) -> None:
    [broken] = case.requests(["long"])
    [feature] = broken.mm_features
    data = {name: msgspec.structs.replace(tensor, data=tensor.data[:-1]) for name, tensor in feature.data.items()}
    bad = msgspec.structs.replace(feature, identifier="0" * 64, data=data)
    broken = msgspec.structs.replace(broken, request_id="broken", mm_features=[bad])
    found = run(case.engine(), [broken, *case.requests()], refused={"broken"})
    assert {name: found.tokens[name] for name in case.expected} == case.expected


def test_prompts_without_exactly_one_sound_at_the_start_are_refused(case: Case) -> None:
    engine = case.engine()
    [whole] = case.requests(["short"])
    [feature] = whole.mm_features
    few = msgspec.structs.replace(feature, length=1499)
    behind = msgspec.structs.replace(feature, offset=1)
    for changed, message in (
        ({"mm_features": []}, "mm_features has 0 items, but each prompt .* add one audio part at the start"),
        ({"mm_features": [behind]}, r"mm_features\[0\].offset is 1, but .* put the audio part before all texts"),
        ({"mm_features": [few]}, "has 1499 embeddings at 1499 positions; a sound of this model has 1500"),
        (
            {"prompt_token_ids": whole.prompt_token_ids[:SOUND_POSITIONS]},
            "has 1504 positions, of which 1504 stand for the sound, but .* add tokens after the audio part",
        ),
    ):
        with pytest.raises(InvalidArgument, match=message):
            engine.preprocess(CLIENT, msgspec.structs.replace(whole, **changed))
    engine.shutdown()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"speculative": {"method": "ngram"}}, "speculative.method is 'ngram'.* set it to ''"),
        ({"lora": {"max_loras": 2}}, "lora.max_loras is 2.* set it to 0"),
        ({"executor": {"tensor_parallel_size": 2}}, "executor.tensor_parallel_size is 2.* set it to 1"),
        ({"executor": {"pipeline_parallel_size": 2}}, "executor.pipeline_parallel_size is 2.* set it to 1"),
        ({"cache": {"dtype": "fp8"}}, "cache.dtype is 'fp8'.* set it to 'auto'"),
        ({"cache": {"block_size": 64}}, "cache.block_size is 64, which does not divide the 1504.* set it to 16 or 32"),
        ({"model": {"max_model_len": 448}}, "model.max_model_len is 448, and 1504 .* set it to at least 1506"),
        ({"model": {"quantization": "fp8"}}, "model.quantization is 'fp8'.* set it to 'auto'"),
    ],
)
def test_settings_that_do_not_work_are_refused_by_name(case: Case, sections: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_speech(config_of(case.path, **sections), "generate")


def test_weights_of_8_bits_change_log_probabilities_only_a_little(case: Case) -> None:
    engine = case.engine(model={"quantization": "int8"})
    [info] = engine.executor.collective_rpc("worker_info")
    assert "int8 weights" in info["computing"]
    found = run(engine, case.requests(["short"], logprobs=0))
    tokens, prompt = found.tokens["short"], case.prompts["short"]
    logits = prompt.logits(tokens)[len(prompt.text) - 1 : -1].log_softmax(-1)
    wanted = [float(row[token]) for row, token in zip(logits, tokens, strict=True)]
    assert list(found.logprobs["short"].logprobs) == pytest.approx(wanted, abs=0.3)


def test_a_pooling_task_and_other_settings_are_refused(case: Case) -> None:
    with pytest.raises(ConfigError, match="model.task is 'embed'.* set it to 'generate'"):
        build_engine(case.path, model={"task": "embed"})
    with pytest.raises(
        ModelLoadError, match="each prompt of a Whisper model has a sound; set multimodal.enabled to true"
    ):
        build_engine(case.path, multimodal={"enabled": False})
    with pytest.raises(ModelLoadError, match="kernels.batch_invariant is true, but only the CPU kernels' decoder"):
        case.engine(kernels={"batch_invariant": True})
    with pytest.raises(ConfigError, match="so no request fits; set cache.kv_cache_memory to at least"):
        case.engine(cache={"num_blocks": 90})


def test_bfloat16_is_as_close_to_float32_as_in_transformers(case: Case) -> None:
    """Rounding changes transformers' log-probabilities by up to 0.05."""
    found = run(case.engine(model={"dtype": "bfloat16"}), case.requests(logprobs=0))
    for name, prompt in case.prompts.items():
        tokens = found.tokens[name]
        logits = prompt.logits(tokens)[len(prompt.text) - 1 : -1].log_softmax(-1)
        wanted = [float(row[token]) for row, token in zip(logits, tokens, strict=True)]
        assert list(found.logprobs[name].logprobs) == pytest.approx(wanted, abs=0.08)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tiny", "base"])
def test_the_shapes_of_published_checkpoints_give_the_tokens_of_transformers(size: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    case = Case(tmp_path, size=size)
    engine = case.engine()
    [info] = engine.executor.collective_rpc("worker_info")
    assert "kernels (linear, attention, sampler)" in info["computing"]
    assert run(engine, case.requests()).tokens == case.expected
