"""Encoders in one call of the CPU kernels: hidden states equal those of transformers, for texts of different lengths."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock_common.types.request import PoolingParams, PoolingTask
from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.forward.backbone import BackboneBatch
from penstock_enginecore.forward.build import BuiltBackbone, ForwardConfig, build_backbone
from penstock_enginecore.lora.device_slots import SlotLimits
from penstock_enginecore.models.encoder import position_offset
from penstock_enginecore.native.library import KernelsError, find_library
from penstock_enginecore.native.weights import round_linears
from penstock_enginecore.pooling.embedder import load_pooling_model
from tests.fakes.engines.in_process import build_engine
from tests.fakes.models.pooling_models import MAX_POSITIONS, TWO_WAY, VOCAB_SIZE, WINDOW, pool, save_pooling_model

SIZES = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.1}
"""Sizes whose heads of 16 elements fit the vectors of every instruction set."""
_PLAIN = ("bert", "camembert", "ernie", "gte", "jina_embeddings_v3", "nomic_bert", "roberta", "xlm-roberta")
ONE_CALL: dict[str, dict[str, Any]] = {
    **{family: {} for family in _PLAIN},
    "electra": {"embedding_size": 64},
    "eurobert": {},
    "modernbert": {},
    "distilbert": {"dim": 64, "hidden_dim": 96, "hidden_size": 64},
    "llama": {**TWO_WAY["llama"], "head_dim": 16},
    "mistral": {**TWO_WAY["mistral"], "head_dim": 16},
    "qwen2": {**TWO_WAY["qwen2"], "head_dim": 16},
}
LENGTHS = (5, 1, 40, 16, 17, MAX_POSITIONS - 2, 5, 33)
ATTENDED = (3, 1, 1, 16, 7, 2 * WINDOW + 1, 4, 32)
"""Numbers of attended tokens of the texts with ``LENGTHS``. Some windows of ModernBERT have no attended token."""


def saved(family: str, directory: Path, **config: Any) -> Any:
    return save_pooling_model(family, directory, **SIZES | ONE_CALL.get(family, {}) | config)


def built(directory: Path, dtype: Any = "float32", *, int8: bool = False, **config: Any) -> BuiltBackbone:
    kernels = config.pop("kernels", KernelsConfig())
    cpu = torch.device("cpu")
    model = load_pooling_model(ModelConfig(path=str(directory), dtype=dtype), "embed", cpu, lambda _: None, widen=True)
    if int8:
        round_linears(model.module)
    settings = {"attention_backend": "auto", "kernels": kernels, "num_threads": 2, "block_size": 16}
    return build_backbone(model, ForwardConfig(device=cpu, rounded=dtype == "bfloat16", **settings | config))


def batch_of(texts: list[np.ndarray], attended: tuple[int, ...] | None = None) -> BackboneBatch:
    types = [(np.arange(len(text)) > 3).astype(np.int64) for text in texts]
    return BackboneBatch(
        token_ids=np.concatenate(texts),
        positions=np.concatenate([np.arange(len(text)) for text in texts]),
        token_types=np.concatenate(types),
        query_start_loc=np.cumsum([0, *map(len, texts)]),
        num_attended=None if attended is None else np.array(attended),
    )


def texts_of(lengths: tuple[int, ...] = LENGTHS) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(4, VOCAB_SIZE, length) for length in lengths]


@torch.inference_mode()
def hidden_of(
    backbone: BuiltBackbone, texts: list[np.ndarray], attended: tuple[int, ...] | None = None
) -> list[torch.Tensor]:
    return list(torch.split(backbone.backbone.run(batch_of(texts, attended)), [len(text) for text in texts]))


@torch.inference_mode()
def expected_of(model: Any, texts: list[np.ndarray], attended: tuple[int, ...] | None = None) -> list[torch.Tensor]:
    # Eager attention averages all tokens if a window has none to attend to.
    model.set_attn_implementation("eager" if attended is None else "sdpa")
    found = []
    for text, end in zip(texts, attended or LENGTHS, strict=True):
        inputs = {
            "input_ids": torch.from_numpy(text)[None],
            "attention_mask": (torch.arange(len(text)) < end).long()[None],
        }
        if getattr(model.config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = (torch.arange(len(text)) > 3).long()[None]
        if offset := position_offset(model.config):
            inputs["position_ids"] = torch.arange(len(text))[None] + offset
        found.append(model(**inputs).last_hidden_state[0])
    return found


def assert_same(backbone: BuiltBackbone, expected: list[torch.Tensor], attended: tuple[int, ...] | None = None) -> None:
    """Check hidden states and embeddings. The matrix unit computes with 16 significant bits, other kernels with 24."""
    scale = 1 if backbone.computing.startswith("amx") else 0.1
    for result, wanted in zip(hidden_of(backbone, texts_of(), attended), expected, strict=True):
        torch.testing.assert_close(result, wanted, atol=2e-4 * scale, rtol=1e-3)
        means = (torch.nn.functional.normalize(each.mean(0), dim=0) for each in (result, wanted))
        torch.testing.assert_close(*means, atol=1e-5 * max(scale, 0.2), rtol=0)


@pytest.mark.parametrize("family", [family for family in ONE_CALL if family not in TWO_WAY])
def test_encoders(family: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path)
    backbone = built(tmp_path)
    assert "(encoder)" in backbone.computing
    assert_same(backbone, expected_of(model, texts_of()))


@pytest.mark.parametrize("family", [family for family in ONE_CALL if family in TWO_WAY])
def test_decoders_with_bidirectional_attention(family: str, tmp_path: Path) -> None:
    saved(family, tmp_path)
    backbone = built(tmp_path)
    assert "(encoder)" in backbone.computing
    modules = built(tmp_path, kernels=KernelsConfig(isa="off"))
    assert_same(backbone, hidden_of(modules, texts_of()))


@pytest.mark.parametrize("isa", ["amx", "avx512_bf16", "avx512", "avx2", "baseline"])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_instruction_sets(isa: Any, family: str, tmp_path: Path) -> None:
    try:
        find_library(isa)
    except KernelsError as error:
        pytest.skip(str(error))
    model = saved(family, tmp_path)
    backbone = built(tmp_path, kernels=KernelsConfig(isa=isa))
    assert f"{isa} kernels (encoder)" in backbone.computing
    assert_same(backbone, expected_of(model, texts_of()))
    assert_same(backbone, expected_of(model, texts_of(), ATTENDED), ATTENDED)


@pytest.mark.parametrize("family", ["bert", "modernbert", "llama"])
def test_attended_tokens(family: str, tmp_path: Path) -> None:
    saved(family, tmp_path)
    backbone, modules = built(tmp_path), built(tmp_path, kernels=KernelsConfig(isa="off"))
    assert "(encoder)" in backbone.computing
    assert_same(backbone, hidden_of(modules, texts_of(), ATTENDED), ATTENDED)
    everything = hidden_of(backbone, texts_of(), LENGTHS)
    assert all(torch.equal(*each) for each in zip(everything, hidden_of(backbone, texts_of()), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attended_tokens_of_a_long_text(dtype: str, tmp_path: Path) -> None:
    """With 16 threads and one head, the kernels compute the segments of keys separately. The last windows see no key."""
    sizes = {"num_attention_heads": 1, "hidden_size": 16, "max_position_embeddings": 1100}
    saved("modernbert", tmp_path, **sizes)
    texts = texts_of((1100,))
    modules = built(tmp_path, dtype, kernels=KernelsConfig(isa="off"))
    one, many = (built(tmp_path, dtype, num_threads=num_threads) for num_threads in (1, 16))
    for attended in ((1030,), (1,)):
        [expected], [result] = (hidden_of(each, texts, attended) for each in (modules, one))
        assert torch.cosine_similarity(result, expected, dim=1).min() > (0.9999 if dtype == "float32" else 0.98)
        assert torch.equal(hidden_of(many, texts, attended)[0], result)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_scores_of_cross_encoders(family: str, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    model = saved(family, tmp_path, head="ForSequenceClassification", num_labels=1)
    engine = build_engine(tmp_path)
    assert "kernels (encoder)" in caplog.text
    texts, start = texts_of(), 4
    inputs = {"token_type_ids": True} if family == "bert" else {}
    expected = []
    for text in texts:
        types = {name: (torch.arange(len(text)) >= start).long()[None] for name in inputs}
        with torch.inference_mode():
            expected.append(model(torch.from_numpy(text)[None], **types).logits[0].sigmoid())
    starts = {index: start for index, text in enumerate(texts) if len(text) > start}
    params = PoolingParams(task=PoolingTask.SCORE)
    results = pool(engine, [text.tolist() for text in texts], params, starts)
    assert len({round(float(each), 3) for each in expected}) > 4
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, atol=1e-4, rtol=0)


def test_results_do_not_depend_on_other_texts(tmp_path: Path) -> None:
    saved("bert", tmp_path)
    backbone, texts = built(tmp_path), texts_of()
    together = hidden_of(backbone, texts)
    for text, result in zip(texts, together, strict=True):
        assert torch.equal(hidden_of(backbone, [text])[0], result)
    backward = hidden_of(backbone, texts[::-1])
    assert all(torch.equal(first, second) for first, second in zip(together, backward[::-1], strict=True))


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_activations(activation: str, tmp_path: Path) -> None:
    model = saved("bert", tmp_path, hidden_act=activation)
    backbone = built(tmp_path)
    assert "(encoder)" in backbone.computing
    assert_same(backbone, expected_of(model, texts_of()))


@pytest.mark.parametrize(("settings", "cosine"), [({"dtype": "bfloat16"}, 0.999), ({"int8": True}, 0.99)])
def test_smaller_weights(settings: dict[str, Any], cosine: float, tmp_path: Path) -> None:
    model = saved("bert", tmp_path)
    backbone = built(tmp_path, **settings)
    assert "(encoder" in backbone.computing
    for result, wanted in zip(hidden_of(backbone, texts_of()), expected_of(model, texts_of()), strict=True):
        assert torch.cosine_similarity(result.mean(0), wanted.mean(0), dim=0) > cosine


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        ("albert", {}, "no plan is known for the model type 'albert'"),
        ("electra", {"embedding_size": 16}, "the embeddings have another size than the hidden states"),
        ("bert", {"hidden_size": 40}, "a head size of 10 is not a multiple of"),
        ("bert", {"hidden_act": "silu"}, "the MLPs use the activation function silu"),
    ],
)
def test_other_models_use_modules(
    family: str, config: dict[str, Any], reason: str, tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level("INFO")
    model = saved(family, tmp_path, **config)
    backbone = built(tmp_path)
    assert "(linear)" in backbone.computing
    assert f"encoder not used: {reason}" in caplog.text
    assert_same(backbone, expected_of(model, texts_of()))


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"lora": SlotLimits(1, 8)}, "LoRA adapters are enabled"), ({"kernels": KernelsConfig(encoder=False)}, "")],
)
def test_settings_that_need_modules(config: dict[str, Any], reason: str, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    saved("bert", tmp_path)
    assert "(linear)" in built(tmp_path, **config).computing
    assert reason in caplog.text


def test_unknown_token_ids_are_refused(tmp_path: Path) -> None:
    saved("bert", tmp_path)
    backbone = built(tmp_path)
    for token_id in (-1, VOCAB_SIZE):
        with pytest.raises(IndexError, match=f"has the token ids 0 to {VOCAB_SIZE - 1}"):
            hidden_of(backbone, [np.array([5, token_id, 6])])
