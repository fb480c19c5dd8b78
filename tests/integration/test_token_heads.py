"""Token embeddings of late-interaction models and sparse embeddings of bge-m3 equal transformers' hidden states and the
layers of the checkpoint, for any other requests in the batch.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from torch.nn.functional import normalize

from penstock_common.errors import InvalidArgument
from penstock_common.types.request import EngineCoreRequest, PoolingParams, PoolingTask
from penstock_enginecore.models.errors import ModelLoadError
from tests.fakes.engines.in_process import build_engine
from tests.fakes.models.pooling_models import (
    VOCAB_SIZE,
    assert_close,
    pool,
    pool_requests,
    save_pooling_model,
    save_sentence_transformer_files,
    write_json,
)
from tests.integration.test_pooling import EMBED, PROMPTS, each, hidden

TOKEN_EMBED = PoolingParams(task=PoolingTask.TOKEN_EMBED)
SPARSE_EMBED = PoolingParams(task=PoolingTask.SPARSE_EMBED)
SPECIAL = {"cls_token": 4, "pad_token": 1, "eos_token": 5, "unk_token": 6}
DIM = 8


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9))


def save_colbert(family: str, directory: Path, **config: Any) -> tuple[Any, torch.Tensor]:
    """Write a checkpoint in the form of Stanford's ColBERT, and return the encoder and the projection."""
    model = save_pooling_model(family, directory, **config)
    prefix, linear = {"bert": "bert.", "xlm-roberta": "roberta."}[family], weights(DIM, 24)
    tensors = {prefix + name: tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file({**tensors, "linear.weight": linear}, directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", {**model.config.to_dict(), "architectures": ["HF_ColBERT"]})
    return model, linear


def save_dense(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    rows, columns = tensors["linear.weight"].shape
    given = {
        "in_features": columns,
        "out_features": rows,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    write_json(folder / "config.json", given | config)
    save_file(tensors, folder / "model.safetensors")


def save_pylate(family: str, directory: Path) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Write a checkpoint in the form of PyLate with two linear layers, and return the encoder and the layers' weights."""
    model, first, residual = save_pooling_model(family, directory), weights(12, 24), weights(12, 24) * 0.5
    save_dense(directory / "1_Dense", {"linear.weight": first, "residual.weight": residual}, use_residual=True)
    save_dense(directory / "2_Dense", {"linear.weight": weights(DIM, 12)}, module_input_name="token_embeddings")
    kinds = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    kinds["2_Dense"] = kinds["1_Dense"]
    write_json(directory / "modules.json", [{"path": path, "type": kind} for path, kind in kinds.items()])
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": 7, "do_lower_case": False})
    return model, first + residual, weights(DIM, 12)


def save_m3(directory: Path, **files: dict[str, torch.Tensor]) -> Any:
    """Write a checkpoint with bge-m3's files, and return the encoder."""
    model = save_pooling_model("xlm-roberta", directory)
    save_sentence_transformer_files(directory, mode="cls", modules=["Normalize"])
    for name, state in files.items():
        torch.save(state, directory / f"{name}_linear.pt")
    vocabulary = {f"t{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t6"))
    tokenizer.add_special_tokens([AddedToken(f"t{index}", special=True) for index in SPECIAL.values()])
    tokenizer.save(str(directory / "tokenizer.json"))
    named: dict[str, Any] = {kind: f"t{index}" for kind, index in SPECIAL.items()}
    write_json(directory / "tokenizer_config.json", named | {"pad_token": {"content": "t1"}})
    return model


def linear_of(outputs: int) -> dict[str, torch.Tensor]:
    return {"weight": weights(outputs, 24), "bias": weights(outputs) * 0.3}


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_colberts_projection_gives_unit_vectors_per_token(family: str, tmp_path: Path) -> None:
    model, linear = save_colbert(family, tmp_path)
    engine = build_engine(tmp_path)
    rows = each(model, lambda output: hidden(output) @ linear.T)
    assert_close(pool(engine, PROMPTS, TOKEN_EMBED), [normalize(each, dim=-1) for each in rows])
    raw = PoolingParams(task=PoolingTask.TOKEN_EMBED, normalize=False, dimensions=3)
    assert_close(pool(engine, PROMPTS, raw), [each[:, :3] for each in rows])
    with pytest.raises(InvalidArgument, match="task is embed; this engine supports token_embed"):
        pool(engine, PROMPTS[:1], EMBED)


@pytest.mark.parametrize("family", ["modernbert", "bert"])
def test_pylates_layers_are_applied_in_order(family: str, tmp_path: Path) -> None:
    model, first, second = save_pylate(family, tmp_path)
    expected = each(model, lambda output: normalize(hidden(output) @ first.T @ second.T, dim=-1))
    assert_close(pool(build_engine(tmp_path), PROMPTS, TOKEN_EMBED), expected)


@pytest.mark.parametrize("family", ["modernbert", "bert", "mpnet"])
def test_no_token_attends_to_unattended_tokens(family: str, tmp_path: Path) -> None:
    model, first, second = save_pylate(family, tmp_path)
    if family == "modernbert":
        model.set_attn_implementation("sdpa")  # eager attention averages all tokens if a window has none to attend to
    starts = [3, None, 5, 39, 4, 1, 20]
    requests, expected = [], []
    for index, (prompt, start) in enumerate(zip(PROMPTS, starts, strict=True)):
        requests.append(
            EngineCoreRequest(
                request_id=str(index), prompt_token_ids=prompt, pooling_params=TOKEN_EMBED, unattended_start=start
            )
        )
        mask = torch.ones(1, len(prompt), dtype=torch.int64)
        mask[0, start or len(prompt) :] = 0
        with torch.inference_mode():
            rows = hidden(model(torch.tensor([prompt]), attention_mask=mask))
        expected.append(normalize(rows @ first.T @ second.T, dim=-1))
    assert_close(pool_requests(build_engine(tmp_path), requests), expected)


@pytest.mark.parametrize("start", [0, 5, 6])
def test_an_unattended_start_outside_the_prompt_is_refused(start: int, tmp_path: Path) -> None:
    save_colbert("bert", tmp_path)
    request = EngineCoreRequest(
        request_id="a", prompt_token_ids=PROMPTS[0], pooling_params=TOKEN_EMBED, unattended_start=start
    )
    with pytest.raises(InvalidArgument, match="inside the prompt of 5 tokens"):
        pool_requests(build_engine(tmp_path), [request])


def test_a_decoder_refuses_unattended_tokens(tmp_path: Path) -> None:
    save_pooling_model("llama", tmp_path)
    request = EngineCoreRequest(
        request_id="a", prompt_token_ids=PROMPTS[0], pooling_params=TOKEN_EMBED, unattended_start=2
    )
    with pytest.raises(InvalidArgument, match="only embedding models with bidirectional attention"):
        pool_requests(build_engine(tmp_path, model={"task": "embed"}), [request])


def test_bge_m3_gives_dense_sparse_and_token_embeddings(tmp_path: Path) -> None:
    colbert, weight = linear_of(DIM), weights(1, 24)
    model = save_m3(tmp_path, colbert=colbert)
    with torch.inference_mode():  # about half of the tokens have no weight
        sparse = {
            "weight": weight,
            "bias": -(hidden(model(torch.tensor([PROMPTS[3]]))) @ weight.T).median(dim=0).values,
        }
    torch.save(sparse, tmp_path / "sparse_linear.pt")
    prompts = [[4, *prompt, *prompt[:2], 6, 5] for prompt in PROMPTS]
    expected: dict[PoolingTask, list[torch.Tensor]] = {task: [] for task in PoolingTask}
    for prompt in prompts:
        with torch.inference_mode():
            rows = hidden(model(torch.tensor([prompt])))
        expected[PoolingTask.EMBED].append(normalize(rows[0], dim=-1))
        token_rows = rows[1:] @ colbert["weight"].T + colbert["bias"]
        expected[PoolingTask.TOKEN_EMBED].append(normalize(token_rows, dim=-1))
        found: dict[int, float] = {}
        for token, weight in zip(prompt, (rows @ sparse["weight"].T + sparse["bias"]).relu()[:, 0], strict=True):
            if token not in SPECIAL.values() and weight > found.get(token, 0.0):
                found[token] = float(weight)
        expected[PoolingTask.SPARSE_EMBED].append(torch.tensor([sorted(found), [found[i] for i in sorted(found)]]))
    engine = build_engine(tmp_path)
    for params in (EMBED, TOKEN_EMBED, SPARSE_EMBED):
        assert_close(pool(engine, prompts, params), expected[params.task])
    entries = [each.shape[1] for each in expected[PoolingTask.SPARSE_EMBED]]
    assert any(0 < n < len(set(prompt)) - 3 for n, prompt in zip(entries, prompts, strict=True)), entries


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"sparse": {"weight": weights(2, 24), "bias": weights(2)}}, r"sparse_linear.pt: .* needs \[1, 24\]"),
        ({"colbert": {"weight": weights(DIM, 20), "bias": weights(DIM)}}, r"colbert_linear.pt: .* needs \[8, 24\]"),
        ({"colbert": {"weight": weights(DIM, 24), "bias": weights(3)}}, r"colbert_linear.pt: .* bias \[3\]"),
        ({"sparse": {"weight": weights(1, 24)}}, "exactly weight and bias"),
    ],
)
def test_files_of_another_model_are_refused(files: Any, message: str, tmp_path: Path) -> None:
    save_m3(tmp_path, **files)
    with pytest.raises(ModelLoadError, match=message):
        build_engine(tmp_path)


def test_a_file_with_code_is_not_executed(tmp_path: Path) -> None:
    save_m3(tmp_path)
    torch.save({"weight": Path("a"), "bias": 1}, tmp_path / "sparse_linear.pt")
    with pytest.raises(ModelLoadError, match="sparse_linear.pt cannot be read"):
        build_engine(tmp_path)


def test_splade_is_refused_by_name(tmp_path: Path) -> None:
    save_pooling_model("bert", tmp_path)
    kinds = {"": "sentence_transformers.models.Transformer", "1": "sentence_transformers.models.SpladePooling"}
    write_json(tmp_path / "modules.json", [{"path": path, "type": kind} for path, kind in kinds.items()])
    with pytest.raises(ModelLoadError, match="SPLADE models are not supported"):
        build_engine(tmp_path)


def test_a_projection_of_another_size_is_refused(tmp_path: Path) -> None:
    save_pylate("bert", tmp_path)
    save_dense(tmp_path / "2_Dense", {"linear.weight": weights(DIM, 11)})
    with pytest.raises(ModelLoadError, match="has 11 input features, but its input has 12"):
        build_engine(tmp_path)
