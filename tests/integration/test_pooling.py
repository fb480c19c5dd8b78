"""Pooled results equal transformers' and sentence-transformers' results, for any other requests in the batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers.sentence_transformer.modules import Dense
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import BertConfig, BertLMHeadModel, RoFormerConfig, RoFormerModel

from penstock_common.errors import ConfigError, InvalidArgument
from penstock_common.types.outputs import FinishReason
from penstock_common.types.request import NO_SAMPLING, EngineCoreRequest, PoolingParams, PoolingTask
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ModelConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup
from penstock_enginecore.core.scheduler.output import NewRequestData, SchedulerOutput
from penstock_enginecore.executor.pooling_runner import PoolingRunner
from penstock_enginecore.executor.worker import Worker
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.worker.messages import WorkerConfig
from tests.fakes.engines.in_process import build_engine
from tests.fakes.models.pooling_models import (
    DECODERS,
    ENCODERS,
    KINDS,
    MAX_POSITIONS,
    TWO_WAY,
    VOCAB_SIZE,
    WINDOW,
    assert_close,
    pool,
    save_logit_score,
    save_pooling_model,
    save_sentence_transformer_files,
    tensor,
    write_json,
)

LENGTHS = (5, 1, 17, 40, 5, 2, 33)
EMBED = PoolingParams(task=PoolingTask.EMBED)
CLASSIFY = PoolingParams(task=PoolingTask.CLASSIFY)
TOKEN_CLASSIFY = PoolingParams(task=PoolingTask.TOKEN_CLASSIFY)
SCORE = PoolingParams(task=PoolingTask.SCORE)


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


PROMPTS = random_prompts(*LENGTHS)


@torch.inference_mode()
def each(model: Any, read: Callable[[Any], torch.Tensor], **inputs: Any) -> list[torch.Tensor]:
    """Return the part of transformers' output that ``read`` selects, for every prompt computed alone."""
    return [read(model(torch.tensor([prompt]), **inputs)) for prompt in PROMPTS]


def hidden(output: Any) -> torch.Tensor:
    return output.last_hidden_state[0]


def logits(output: Any) -> torch.Tensor:
    return output.logits[0]


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_embeds_with_the_mean_of_its_tokens(family: str, tmp_path: Path) -> None:
    model = save_pooling_model(family, tmp_path)
    expected = each(model, lambda output: hidden(output).mean(dim=0))
    assert max(LENGTHS) > 2 * WINDOW
    assert_close(pool(build_engine(tmp_path), PROMPTS, EMBED), expected)


@pytest.mark.parametrize("family", [next(iter(ENCODERS)), next(iter(DECODERS))])
def test_a_bfloat16_checkpoint_is_pooled_in_float32(family: str, tmp_path: Path) -> None:
    made = save_pooling_model(family, tmp_path)
    made.bfloat16().save_pretrained(tmp_path)
    model = type(made).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    engine = build_engine(tmp_path, model={"task": "embed"})
    [info] = engine.executor.collective_rpc("worker_info")
    assert "kernels (linear" in info["computing"]
    assert info["dtype"] == "float32"
    pooled = (lambda states: states.mean(dim=0)) if family in ENCODERS else (lambda states: states[-1])
    assert_close(pool(engine, PROMPTS, EMBED), each(model, lambda output: pooled(hidden(output))))


@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_embeds_with_its_last_token(family: str, tmp_path: Path) -> None:
    model = save_pooling_model(family, tmp_path)
    engine = build_engine(tmp_path, model={"task": "embed"})
    assert_close(pool(engine, PROMPTS, EMBED), each(model, lambda output: hidden(output)[-1]))


@pytest.mark.parametrize(
    ("mode", "rows"), [("cls", slice(0, 1)), ("lasttoken", slice(-1, None)), ("mean", slice(None))]
)
def test_sentence_transformers_files_say_how_to_pool(mode: str, rows: slice, tmp_path: Path) -> None:
    model = save_pooling_model("qwen3", tmp_path)
    save_sentence_transformer_files(tmp_path, mode=mode, modules=["Normalize"])
    expected = each(model, lambda output: torch.nn.functional.normalize(hidden(output)[rows].mean(dim=0), dim=0))
    assert_close(pool(build_engine(tmp_path), PROMPTS, EMBED), expected)


@pytest.mark.parametrize("mode", ["cls", "lasttoken", "max", "mean", "weightedmean"])
def test_a_prompt_in_chunks_is_pooled_like_a_whole_one(mode: str, tmp_path: Path) -> None:
    save_pooling_model("llama", tmp_path)
    save_sentence_transformer_files(tmp_path, mode=mode)
    whole = pool(build_engine(tmp_path), PROMPTS, EMBED)
    assert_close(pool(build_engine(tmp_path, scheduler={"max_num_batched_tokens": 7}), PROMPTS, EMBED), whole)


def test_preempted_prompts_begin_again(tmp_path: Path) -> None:
    model = save_pooling_model("llama", tmp_path)
    save_sentence_transformer_files(tmp_path, mode="mean")
    engine = build_engine(tmp_path, cache={"num_blocks": 13}, scheduler={"max_num_batched_tokens": 9, "watermark": 0.0})
    expected = each(model, lambda output: hidden(output).mean(dim=0))
    assert_close(pool(engine, PROMPTS, EMBED), expected)


@pytest.mark.parametrize("family", [*KINDS, *DECODERS])
def test_token_embed_gives_every_tokens_hidden_state(family: str, tmp_path: Path) -> None:
    model = save_pooling_model(family, tmp_path)
    engine = build_engine(tmp_path, model={"task": "embed"})
    assert_close(pool(engine, PROMPTS, PoolingParams(task=PoolingTask.TOKEN_EMBED)), each(model, hidden))


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_a_classifier_gives_the_probabilities_of_its_own_head(family: str, tmp_path: Path) -> None:
    model = save_pooling_model(family, tmp_path, head="ForSequenceClassification", num_labels=3)
    expected = each(model, lambda output: logits(output).softmax(dim=-1))
    assert_close(pool(build_engine(tmp_path), PROMPTS, CLASSIFY), expected)


@pytest.mark.parametrize("family", TWO_WAY)
def test_a_decoder_may_attend_in_both_directions(family: str, tmp_path: Path) -> None:
    """transformers ignores the flags of most configurations, so it gets a mask that allows every key."""
    model = save_pooling_model(family, tmp_path, **TWO_WAY[family])

    def expected(prompt: list[int]) -> torch.Tensor:
        masks = {} if family == "gemma3_text" else {"attention_mask": torch.zeros(1, 1, len(prompt), len(prompt))}
        return hidden(model(torch.tensor([prompt]), **masks)).mean(dim=0)

    with torch.inference_mode():
        assert_close(pool(build_engine(tmp_path), PROMPTS, EMBED), [expected(prompt) for prompt in PROMPTS])


@pytest.mark.parametrize(
    "config",
    [
        {"share_att_key": False},
        {"share_att_key": False, "pos_att_type": ["c2p"], "position_buckets": -1},
        {"pos_att_type": ["p2c"], "position_biased_input": True, "type_vocab_size": 0},
        {"relative_attention": False, "pos_att_type": None},
    ],
)
def test_each_form_of_debertas_attention(config: dict[str, Any], tmp_path: Path) -> None:
    model = save_pooling_model("deberta-v2", tmp_path, **config)
    expected = each(model, lambda output: hidden(output).mean(dim=0))
    assert_close(pool(build_engine(tmp_path), PROMPTS, EMBED), expected)


def test_modernberts_head_can_take_the_mean(tmp_path: Path) -> None:
    model = save_pooling_model("modernbert", tmp_path, head="ForSequenceClassification", classifier_pooling="mean")
    expected = each(model, lambda output: logits(output).softmax(dim=-1))
    assert_close(pool(build_engine(tmp_path), PROMPTS, CLASSIFY), expected)


@pytest.mark.parametrize("family", [*KINDS, "qwen3"])
def test_a_token_classifier_gives_probabilities_per_token(family: str, tmp_path: Path) -> None:
    model = save_pooling_model(family, tmp_path, head="ForTokenClassification", num_labels=4)
    expected = each(model, lambda output: logits(output).softmax(dim=-1))
    assert_close(pool(build_engine(tmp_path), PROMPTS, TOKEN_CLASSIFY), expected)


def test_a_decoders_classifier_reads_the_last_unpadded_token_even_in_chunks(tmp_path: Path) -> None:
    model = save_pooling_model("llama", tmp_path, head="ForSequenceClassification", num_labels=3)
    prompt = [*PROMPTS[2], 0, 0, 0]
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).logits[0].softmax(dim=-1)]
    engine = build_engine(tmp_path, scheduler={"max_num_batched_tokens": 18})
    assert_close(pool(engine, [prompt], CLASSIFY), expected)


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"num_labels": 1}, torch.sigmoid),
        ({"num_labels": 1, "problem_type": "regression"}, lambda x: x),
    ],
)
def test_the_kind_of_problem_decides_the_activation(config: dict[str, Any], activation: Any, tmp_path: Path) -> None:
    model = save_pooling_model("bert", tmp_path, head="ForSequenceClassification", **config)
    assert_close(pool(build_engine(tmp_path), PROMPTS, CLASSIFY), each(model, lambda out: activation(logits(out))))


def test_without_activation_the_scores_are_the_heads(tmp_path: Path) -> None:
    model = save_pooling_model("bert", tmp_path, head="ForSequenceClassification", num_labels=3)
    params = PoolingParams(task=PoolingTask.CLASSIFY, use_activation=False)
    assert_close(pool(build_engine(tmp_path), PROMPTS, params), each(model, logits))


def test_a_pair_is_scored_with_the_token_types_of_its_texts(tmp_path: Path) -> None:
    model = save_pooling_model("bert", tmp_path, head="ForSequenceClassification", num_labels=1)
    prompt, start = PROMPTS[2], 6
    types = torch.tensor([[0] * start + [1] * (len(prompt) - start)])
    with torch.inference_mode():
        pair, single = (model(torch.tensor([prompt]), token_type_ids=t).logits[0] for t in (types, types * 0))
    results = pool(build_engine(tmp_path), [prompt, PROMPTS[0], prompt], SCORE, {0: start})
    assert_close([results[0], results[2]], [pair.sigmoid(), single.sigmoid()])
    assert (pair - single).abs() > 1e-3


@pytest.mark.parametrize(
    ("family", "tokens", "config"),
    [
        ("qwen3", {"true_token_id": 7, "false_token_id": 9}, {"tie_word_embeddings": True}),
        ("llama", {"true_token_id": 7}, {}),
        ("gemma2", {"true_token_id": 7, "false_token_id": 9}, {"final_logit_softcapping": 0.5}),
    ],
)
def test_a_generative_reranker_scores_with_the_logits_of_its_tokens(
    family: str, tokens: dict[str, int], config: dict[str, Any], tmp_path: Path
) -> None:
    model = save_pooling_model(family, tmp_path, head="ForCausalLM", **config)
    save_logit_score(tmp_path, **tokens)

    def score(output: Any) -> torch.Tensor:
        last = output.logits[0, -1]
        return (last[7] - last[9] if len(tokens) > 1 else last[7])[None].sigmoid()

    expected = each(model, score)
    for budget in (64, 9):
        engine = build_engine(tmp_path, scheduler={"max_num_batched_tokens": budget})
        assert_close(pool(engine, PROMPTS, SCORE), expected)
        assert_close(pool(engine, PROMPTS, CLASSIFY), expected)


def test_yes_and_no_are_the_tokens_of_a_reranker_without_files(tmp_path: Path) -> None:
    model = save_pooling_model("qwen3", tmp_path, head="ForCausalLM")
    message = "the model has no classification head, and its tokenizer lacks the tokens 'yes' and 'no'"
    Tokenizer(WordLevel({"[UNK]": 0, "yes": 7}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    assert message in refused(tmp_path, task="classify")
    Tokenizer(WordLevel({"[UNK]": 0, "yes": 7, "no": 9}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    expected = each(model, lambda output: (output.logits[0, -1, 7] - output.logits[0, -1, 9])[None].sigmoid())
    assert_close(pool(build_engine(tmp_path, model={"task": "classify"}), PROMPTS, SCORE), expected)


@pytest.mark.parametrize(
    ("family", "config", "tokens", "message"),
    [
        ("granite", {"logits_scaling": 8.0}, {"true_token_id": 7}, "its logits_scaling is 8.0; supported: 1"),
        ("llama", {}, {"true_token_id": VOCAB_SIZE}, f"are not below its vocabulary size, {VOCAB_SIZE}"),
        ("llama", {}, {"true_token_id": "yes"}, "true_token_id and false_token_id of LogitScore must be ids of tokens"),
    ],
)
def test_other_rerankers_are_refused(
    family: str, config: dict[str, Any], tokens: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_pooling_model(family, tmp_path, head="ForCausalLM", **config)
    save_logit_score(tmp_path, **tokens)
    assert message in refused(tmp_path)


def test_a_cross_encoder_may_name_its_activation(tmp_path: Path) -> None:
    named = {"activation_fn": "torch.nn.modules.linear.Identity"}
    model = save_pooling_model(
        "bert", tmp_path, head="ForSequenceClassification", num_labels=1, sentence_transformers=named
    )
    assert_close(pool(build_engine(tmp_path), PROMPTS, SCORE), each(model, logits))


@pytest.mark.parametrize("normalized", [True, False])
def test_dimensions_cut_vectors_before_they_are_scaled(normalized: bool, tmp_path: Path) -> None:
    model = save_pooling_model("bert", tmp_path)
    params = PoolingParams(task=PoolingTask.EMBED, dimensions=5, normalize=normalized)
    expected = each(model, lambda output: hidden(output).mean(dim=0)[:5])
    expected = [v / v.norm() for v in expected] if normalized else expected
    assert_close(pool(build_engine(tmp_path), PROMPTS, params), expected)


def test_a_dense_layer_follows_pooling(tmp_path: Path) -> None:
    model = save_pooling_model("bert", tmp_path)
    save_sentence_transformer_files(tmp_path, mode="mean", modules=["Dense", "Normalize"])
    dense = Dense(24, 10)
    (tmp_path / "2_Dense").mkdir()
    dense.save(str(tmp_path / "2_Dense"))

    def embedded(output: Any) -> torch.Tensor:
        vector = dense({"sentence_embedding": hidden(output).mean(dim=0)})["sentence_embedding"]
        return torch.nn.functional.normalize(vector, dim=0)

    engine = build_engine(tmp_path)
    assert_close(pool(engine, PROMPTS, EMBED), each(model, embedded))
    assert engine.model.pooling is not None
    assert engine.model.pooling.embedding_size == 10


def test_a_bert_without_pooler_weights_embeds(tmp_path: Path) -> None:
    model = save_pooling_model("bert", tmp_path)
    model.pooler = None
    model.save_pretrained(tmp_path)
    assert_close(pool(build_engine(tmp_path), PROMPTS, EMBED), each(model, lambda out: hidden(out).mean(dim=0)))


@pytest.mark.parametrize(("family", "longest"), [("bert", MAX_POSITIONS), ("roberta", MAX_POSITIONS - 2)])
def test_a_prompt_may_be_as_long_as_there_are_positions(family: str, longest: int, tmp_path: Path) -> None:
    model = save_pooling_model(family, tmp_path)
    engine = build_engine(tmp_path)
    assert engine.max_model_len == longest
    (prompt,) = random_prompts(longest)
    with torch.inference_mode():
        expected = hidden(model(torch.tensor([prompt]))).mean(dim=0)
    assert_close(pool(engine, [prompt], EMBED), [expected])


def test_the_length_a_model_was_tuned_for_is_its_limit(tmp_path: Path) -> None:
    save_pooling_model("bert", tmp_path)
    save_sentence_transformer_files(tmp_path, mode="mean", max_seq_length=20)
    assert build_engine(tmp_path).max_model_len == 20


def test_an_encoder_never_computes_a_part_of_a_prompt(tmp_path: Path) -> None:
    model = save_pooling_model("bert", tmp_path)
    engine = build_engine(
        tmp_path, scheduler={"max_num_batched_tokens": 42, "max_num_seqs": 2, "long_prefill_token_threshold": 3}
    )
    assert engine.max_model_len == 42
    assert_close(pool(engine, PROMPTS, EMBED), each(model, lambda output: hidden(output).mean(dim=0)))


def test_a_longer_limit_than_a_step_is_refused_for_an_encoder(tmp_path: Path) -> None:
    save_pooling_model("bert", tmp_path)
    with pytest.raises(ConfigError, match=r"model.max_model_len is 50.*max_num_batched_tokens, 42"):
        build_engine(tmp_path, model={"max_model_len": 50}, scheduler={"max_num_batched_tokens": 42})


def test_profiling_the_largest_step_leaves_the_runner_as_it_was(tmp_path: Path) -> None:
    model = save_pooling_model("llama", tmp_path)
    config = EngineCoreConfig(
        model=ModelConfig(path=str(tmp_path), device="cpu", task="embed"), cache=CacheConfig(num_blocks=64)
    )
    worker = Worker(WorkerConfig(engine=config))
    worker.load_model(lambda line: None)
    specs = worker.kv_cache_specs()
    assert isinstance(worker.runner, PoolingRunner)
    worker.runner.profile(2 * MAX_POSITIONS + 3, 1)
    worker.initialize_kv_cache(
        KVCacheConfig(
            num_blocks=9, block_size=16, groups=(KVCacheGroup(layer_names=tuple(specs)),), max_model_len=MAX_POSITIONS
        )
    )
    new = NewRequestData(
        request_id="r",
        token_ids=PROMPTS[2],
        num_prompt_tokens=17,
        num_computed_tokens=0,
        block_ids=([5, 3],),
        sampling_params=NO_SAMPLING,
        pooling_params=EMBED,
    )
    worker.runner.execute(SchedulerOutput(new_requests=[new], num_scheduled_tokens={"r": 17}))
    assert_close([tensor(worker.runner.sample().pooled["r"])], [each(model, lambda out: hidden(out)[-1])[2]])


def test_a_pooling_request_ends_as_stop_and_leaves_nothing(tmp_path: Path) -> None:
    save_pooling_model("bert", tmp_path)
    engine = build_engine(tmp_path)
    engine.add(
        engine.preprocess("c", EngineCoreRequest(request_id="r", prompt_token_ids=PROMPTS[0], pooling_params=EMBED))
    )
    (output,) = engine.step(lambda: None)["c"].outputs
    assert (output.finish_reason, output.new_token_ids) == (FinishReason.STOP, [])
    assert output.prefill_stats is not None
    engine.step(lambda: None)
    assert not engine.has_work


def test_a_generating_engine_refuses_to_embed(tmp_path: Path) -> None:
    from tests.fakes.models.tiny_models import save_tiny_model

    save_tiny_model("llama", tmp_path)
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[1], pooling_params=EMBED)
    with pytest.raises(InvalidArgument, match="task is embed; this engine supports generate"):
        build_engine(tmp_path).preprocess("c", request)


def test_an_embedding_engine_refuses_what_it_does_not_serve(tmp_path: Path) -> None:
    save_pooling_model("bert", tmp_path)
    engine = build_engine(tmp_path)
    with pytest.raises(InvalidArgument, match="does not generate; its pooling tasks are embed, token_embed"):
        engine.preprocess("c", EngineCoreRequest(request_id="r", prompt_token_ids=[1]))
    with pytest.raises(InvalidArgument, match="task is classify; this engine supports embed, token_embed"):
        engine.preprocess("c", EngineCoreRequest(request_id="r", prompt_token_ids=[1], pooling_params=CLASSIFY))
    long = EngineCoreRequest(request_id="r", prompt_token_ids=[1] * (MAX_POSITIONS + 1), pooling_params=EMBED)
    with pytest.raises(InvalidArgument, match=f"has {MAX_POSITIONS + 1} tokens; max_model_len is {MAX_POSITIONS}"):
        engine.preprocess("c", long)


def refused(path: Path, **model: Any) -> str:
    with pytest.raises(ModelLoadError) as error:
        build_engine(path, model=model)
    return str(error.value)


def test_another_encoder_is_refused_by_name(tmp_path: Path) -> None:
    RoFormerModel(
        RoFormerConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    ).save_pretrained(tmp_path)
    assert "RoFormerModel is not supported: its model type is 'roformer'" in refused(tmp_path)


def test_debertas_convolution_is_refused(tmp_path: Path) -> None:
    save_pooling_model("deberta-v2", tmp_path, conv_kernel_size=3)
    assert "DebertaV2Model is not supported: its conv_kernel_size is 3; supported: 0" in refused(tmp_path)


def test_an_encoder_turned_into_a_decoder_is_refused(tmp_path: Path) -> None:
    config = BertConfig(
        is_decoder=True, vocab_size=40, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    BertLMHeadModel(config).save_pretrained(tmp_path)
    assert "BertModel is not supported: its configuration turns an encoder into a decoder" in refused(
        tmp_path, task="embed"
    )


def test_a_decoder_with_bidirectional_attention_does_not_generate(tmp_path: Path) -> None:
    save_pooling_model("llama", tmp_path, is_causal=False)
    assert "its configuration sets bidirectional attention, so it can embed" in refused(tmp_path, task="generate")


def test_other_decoders_with_bidirectional_attention_are_refused(tmp_path: Path) -> None:
    save_pooling_model("olmo2", tmp_path / "type", is_causal=False)
    message = "Olmo2Model is not supported: its configuration sets bidirectional attention, which is supported for"
    assert message in refused(tmp_path / "type")
    save_pooling_model("mistral", tmp_path / "window", is_causal=False, sliding_window=8)
    assert "in attention call 0, attention has a sliding window" in refused(tmp_path / "window")


def test_classifying_without_a_head_is_refused(tmp_path: Path) -> None:
    save_pooling_model("bert", tmp_path)
    assert "model.task is 'classify' but BertModel has no classification head" in refused(tmp_path, task="classify")


@pytest.mark.parametrize(
    ("mode", "modules", "message"),
    [
        (
            "min",
            [],
            "sets the pooling mode min; supported: cls, max, mean, mean_sqrt_len_tokens, weightedmean, lasttoken",
        ),
        ("mean", ["LSTM"], "a module of type 'sentence_transformers.models.LSTM'"),
        ("mean", ["Normalize", "Dense"], "after Pooling, only Dense and a last Normalize"),
    ],
)
def test_other_ways_to_pool_are_refused_by_name(mode: str, modules: list[str], message: str, tmp_path: Path) -> None:
    save_pooling_model("bert", tmp_path)
    save_sentence_transformer_files(tmp_path, mode=mode, modules=modules)
    assert message in refused(tmp_path)


def test_the_results_of_several_older_pooling_modes_are_joined(tmp_path: Path) -> None:
    model = save_pooling_model("bert", tmp_path)
    save_sentence_transformer_files(tmp_path, mode="mean")
    flags = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    write_json(tmp_path / "1_Pooling/config.json", flags)
    engine = build_engine(tmp_path)
    expected = each(model, lambda output: torch.cat([hidden(output)[0], hidden(output).mean(dim=0)]))
    assert_close(pool(engine, PROMPTS, EMBED), expected)
    with pytest.raises(InvalidArgument, match="this engine supports embed"):
        pool(engine, PROMPTS, PoolingParams(task=PoolingTask.TOKEN_EMBED))


def test_pooling_without_the_tokens_of_a_prompt_is_refused(tmp_path: Path) -> None:
    save_pooling_model("bert", tmp_path)
    save_sentence_transformer_files(tmp_path, mode="mean")
    write_json(tmp_path / "1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False})
    build_engine(tmp_path)
    write_json(tmp_path / "config_sentence_transformers.json", {"prompts": {"query": "q: "}})
    assert "sets include_prompt to false, but pooling without the tokens of a prompt" in refused(tmp_path)


def test_texts_that_would_have_to_be_lowercased_are_refused(tmp_path: Path) -> None:
    save_pooling_model("bert", tmp_path)
    save_sentence_transformer_files(tmp_path, mode="mean")
    write_json(tmp_path / "sentence_bert_config.json", {"do_lower_case": True})
    assert "do_lower_case is true" in refused(tmp_path)


@pytest.mark.parametrize("family", ["qwen3_5", "granitemoehybrid", "jamba", "kimi_linear", "mamba2"])
@pytest.mark.parametrize("budget", [7, 64])
def test_a_model_with_recurrent_layers_embeds_prompts_in_any_chunks(family: str, budget: int, tmp_path: Path) -> None:
    from tests.fakes.models.tiny_models import save_tiny_model

    model = save_tiny_model(family, tmp_path).base_model
    save_sentence_transformer_files(tmp_path, mode="mean")
    engine = build_engine(
        tmp_path,
        model={"task": "embed"},
        cache={"block_size": 16},
        scheduler={"max_num_batched_tokens": budget},
    )
    prompts = [[token % 320 for token in prompt] for prompt in PROMPTS]
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).last_hidden_state[0].mean(dim=0) for prompt in prompts]
    assert_close(pool(engine, prompts, EMBED), expected)
