"""Adapters that could not be served as trained, each made from a good adapter, with the expected error."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from penstock_enginecore.lora.errors import LoraReason
from tests.fakes.models.adapters import CONFIG, TENSORS, edit_config, edit_tensors, save_adapter

R = LoraReason
MAX_RANK = 16
"""Rank limit of the engine that reads the adapters."""
FAMILY, CHANGES = "llama", {"tie_word_embeddings": False}
"""Model type, and config changes, of the tiny model for which the adapters are made."""
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
A0, B0 = f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight"
HEAD_COPY = "base_model.model.lm_head.base_layer.weight"


def save_good_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Save a valid adapter of the model, as input for ``Broken.do``."""
    save_adapter(model, folder, r=4, target_modules=["q_proj", "down_proj", "lm_head"])


@dataclass(frozen=True)
class Broken:
    """A defect. ``do`` applies it to a good adapter's directory. The error has ``reason`` and all of ``words``."""

    do: Callable[[Path], None]
    reason: LoraReason
    words: tuple[str, ...]


def config(reason: LoraReason, *words: str, **changes: Any) -> Broken:
    return Broken(lambda folder: edit_config(folder, **changes), reason, (CONFIG, *words))


def tensors(edit: Callable[[dict[str, torch.Tensor]], Any], reason: LoraReason, *words: str) -> Broken:
    return Broken(lambda folder: edit_tensors(folder, lambda held: void(edit(held))), reason, (TENSORS, *words))


def void(_: Any) -> None:
    pass


def text(content: bytes, reason: LoraReason, *words: str) -> Broken:
    return Broken(lambda folder: void((folder / CONFIG).write_bytes(content)), reason, (CONFIG, *words))


def header(edit: Callable[[dict[str, Any]], Any], reason: LoraReason, *words: str) -> Broken:
    def do(folder: Path) -> None:
        data = (folder / TENSORS).read_bytes()
        length = int.from_bytes(data[:8], "little")
        held = json.loads(data[8 : 8 + length])
        edit(held)
        written = json.dumps(held).encode()
        (folder / TENSORS).write_bytes(len(written).to_bytes(8, "little") + written + data[8 + length :])

    return Broken(do, reason, (TENSORS, *words))


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda held: held.update({name: torch.ones(shape, dtype=dtype)})


def without(key: str) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        settings = json.loads((folder / CONFIG).read_text())
        del settings[key]
        (folder / CONFIG).write_text(json.dumps(settings))

    return do


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / TENSORS), folder / "adapter_model.bin")
    (folder / TENSORS).unlink()


def cut(share: float) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        data = (folder / TENSORS).read_bytes()
        (folder / TENSORS).write_bytes(data[: int(len(data) * share)])

    return do


def as_model(folder: Path) -> None:
    (folder / CONFIG).rename(folder / "config.json")


def as_pipe(folder: Path) -> None:
    (folder / TENSORS).unlink()
    os.mkfifo(folder / TENSORS)


def in_rows(name: str, row: int, column: int, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(held: dict[str, torch.Tensor]) -> None:
        held[name][row, column] = value

    return edit


def huge_head(folder: Path) -> None:
    data = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes((1 << 62).to_bytes(8, "little") + data[8:])


def renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda held: held.update({new: held.pop(old)})


BROKEN = {
    # Requested features that are not supported
    "dora": config(R.DORA, "use_dora has an unsupported value", "True", use_dora=True),
    "modules_to_save": config(R.MODULES_TO_SAVE, "['embed_tokens']", modules_to_save=["embed_tokens"]),
    "biases": config(R.BIAS, "'lora_only'", "only 'none'", bias="lora_only"),
    "lora_bias": config(R.LORA_BIAS, "lora_bias", lora_bias=True),
    "fan_in_fan_out": config(R.FAN_IN_FAN_OUT, "fan_in_fan_out", fan_in_fan_out=True),
    "target_parameters": config(R.TARGET_PARAMETERS, "experts.gate_up", target_parameters=["experts.gate_up"]),
    "layer_replication": config(R.LAYER_REPLICATION, "[[0, 2], [1, 2]]", layer_replication=[[0, 2], [1, 2]]),
    "trainable tokens": config(R.TRAINABLE_TOKENS, "[5, 7]", trainable_token_indices=[5, 7]),
    "activated lora": config(R.SETTING, "alora_invocation_tokens", alora_invocation_tokens=[1, 2]),
    "qalora": config(R.SETTING, "use_qalora", use_qalora=True),
    "block-diagonal": config(R.SETTING, "use_bdlora", use_bdlora={"nblocks": 2}),
    "monteclora": config(R.SETTING, "monteclora_config", monteclora_config={"num_samples": 8}),
    "a setting of tomorrow": config(R.SETTING, "use_quantum has an unsupported value", "'yes'", use_quantum="yes"),
    "pissa": config(R.CHANGED_BASE, "'pissa_niter_16'", "path_initial_model", init_lora_weights="pissa_niter_16"),
    "olora": config(R.CHANGED_BASE, "'olora'", init_lora_weights="olora"),
    "corda": config(R.CHANGED_BASE, "'corda'", init_lora_weights="corda"),
    "loftq": config(R.CHANGED_BASE, "'loftq'", init_lora_weights="loftq"),
    "lora_ga": config(R.CHANGED_BASE, "'lora_ga'", init_lora_weights="lora_ga"),
    "another type": config(R.PEFT_TYPE, "'IA3'", "only LORA", peft_type="IA3"),
    "no type": Broken(without("peft_type"), R.PEFT_TYPE, (CONFIG, "None")),
    "another task": config(R.TASK_TYPE, "'SEQ_2_SEQ_LM'", "CAUSAL_LM", task_type="SEQ_2_SEQ_LM"),
    # Ranks and scales
    "rank above the limit": config(R.RANK, "32 (at most 16: lora.max_lora_rank)", "q_proj.lora_A.weight", r=32),
    "rank above the limit in a layer": config(
        R.RANK, "17 (at most 16: lora.max_lora_rank)", "layers.1.mlp.down_proj", rank_pattern={"1.mlp.down_proj": 17}
    ),
    "rank 0": config(R.RANK, "r has an unsupported value: 0 (from 1 to 16)", r=0),
    "rank -1 in a pattern": config(R.RANK, "rank_pattern['q_proj']", "-1", rank_pattern={"q_proj": -1}),
    "rank of another kind": config(R.CONFIG, "$.r", "int", r="four"),
    "rank that is a fraction": config(R.CONFIG, "$.r", r=4.5),
    "alpha beyond all numbers": text(
        b'{"peft_type": "LORA", "target_modules": ["q_proj"], "lora_alpha": 1e999}', R.CONFIG, "out of range"
    ),
    "alpha that makes numbers infinite": Broken(
        lambda folder: edit_config(folder, lora_alpha=1e300), R.NOT_FINITE, (TENSORS, "lora_B.weight", "times 2.5e+299")
    ),
    # Layers
    "no targets": Broken(without("target_modules"), R.CONFIG, (CONFIG, "target_modules is missing")),
    "targets that the model lacks": config(R.NO_TARGETS, "['c_attn', 'w1']", target_modules=["w1", "c_attn"]),
    "targets of no layers": config(R.NO_TARGETS, "[]", target_modules=[]),
    "layers that the model lacks": config(
        R.NO_TARGETS, "q_proj", target_modules=["q_proj"], layers_to_transform=[9], layers_pattern="layers"
    ),
    "an embedding among targets": config(
        R.EMBEDDING, "model.embed_tokens", target_modules=["q_proj", "down_proj", "lm_head", "embed_tokens"]
    ),
    "an expression that is none": config(R.CONFIG, "target_modules", "'(q_proj'", target_modules="(q_proj"),
    "a pattern that is none": config(R.CONFIG, "rank_pattern", "'[a'", rank_pattern={"[a": 3}),
    "an expression without end": config(
        R.CONFIG, "takes too long", "0.5 s", target_modules=r"(\w|\.|\w\.)*(\w|\.|\w\w)*(\w|\.|\w\w)*\d"
    ),
    "an expression that is too long": config(R.CONFIG, "too long", "4096", target_modules="(a|b)" * 1000),
    "too many patterns": config(
        R.CONFIG, "rank_pattern", "5000", "at most 4096", rank_pattern={f"layer{i}": 3 for i in range(5000)}
    ),
    "layers of an expression": config(
        R.CONFIG, "layers_to_transform", target_modules=".*q_proj", layers_to_transform=[0]
    ),
    # The configuration as a file
    "no configuration": Broken(lambda f: (f / CONFIG).unlink(), R.NOT_FOUND, (CONFIG, "missing")),
    "a model's configuration": Broken(as_model, R.NOT_FOUND, (CONFIG, "contains a model")),
    "an empty configuration": text(b"", R.CONFIG, "cannot be read"),
    "a configuration that is cut off": text(b'{"peft_type": "LORA", "r": ', R.CONFIG, "cannot be read"),
    "a configuration in no encoding": text(b'{"peft_type": "\xff\xfe"}', R.CONFIG, "cannot be read"),
    "a configuration that is a list": text(b"[1, 2]", R.CONFIG, "not a JSON object", "list"),
    "a configuration without bottom": text(b"[" * 100_000, R.CONFIG, "cannot be read"),
    "a configuration that is too large": text(b" " * (1 << 20) + b"{}", R.CONFIG, "too large", "at most 1048576"),
    "a pointer of Git LFS for a configuration": text(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", R.NOT_FOUND, "git lfs pull"
    ),
    # The tensors as a file
    "no tensors": Broken(lambda f: (f / TENSORS).unlink(), R.NOT_FOUND, (TENSORS, "missing")),
    "a pickle": Broken(as_pickle, R.PICKLE, ("adapter_model.bin", "may run code", "safe_serialization")),
    "a directory for tensors": Broken(
        lambda f: void(((f / TENSORS).unlink(), (f / TENSORS).mkdir())), R.UNREADABLE, (TENSORS, "not a regular file")
    ),
    "a pipe for tensors": Broken(as_pipe, R.UNREADABLE, (TENSORS, "not a regular file")),
    "tensors that are cut off": Broken(cut(0.9), R.TENSOR_FILE, (TENSORS, "tensor base_model", "ends before the end")),
    "a header that is cut off": Broken(cut(0.001), R.TENSOR_FILE, (TENSORS, "header is incomplete")),
    "an empty file of tensors": Broken(cut(0), R.TENSOR_FILE, (TENSORS, "header is incomplete", "0 bytes")),
    "a header of no end": Broken(huge_head, R.TENSOR_FILE, (TENSORS, "header is incomplete")),
    "a pointer of Git LFS for tensors": Broken(
        lambda f: void((f / TENSORS).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")),
        R.NOT_FOUND,
        (TENSORS, "git lfs pull"),
    ),
    "bytes behind the tensors": Broken(
        lambda f: void((f / TENSORS).write_bytes((f / TENSORS).read_bytes() + b"more")),
        R.TENSOR_FILE,
        (TENSORS, "bytes after the last tensor", "4 bytes"),
    ),
    "tensors that overlap": header(
        lambda held: held[B0].update(data_offsets=held[A0]["data_offsets"]), R.TENSOR_FILE, "lora_B"
    ),
    "a shape that its bytes are not of": header(
        lambda held: held[A0].update(shape=[5, 48]), R.TENSOR_FILE, A0, "[5, 48]"
    ),
    "a negative shape": header(lambda held: held[A0].update(shape=[-4, -48]), R.TENSOR_FILE, A0, "[-4, -48]"),
    "a name without end": header(lambda held: held.update({"a" * 600: held.pop(A0)}), R.TENSOR_FILE, "too long", "512"),
    "a shape without end": header(lambda held: held[A0].update(shape=[9] * 5000), R.TENSOR_FILE, A0, "8 axes"),
    "a type that is unknown": header(lambda held: held[A0].update(dtype="F7"), R.DTYPE, A0, "'F7'", "F32, F16, BF16"),
    # Tensors
    "no tensors of a target": tensors(
        lambda held: (held.pop(A0), held.pop(B0)), R.MISSING_TENSOR, A0, "the tensor is missing", "[4, 48]"
    ),
    "no B": tensors(lambda held: held.pop(B0), R.MISSING_TENSOR, B0, "[48, 4]"),
    "tensors of another layer": tensors(
        put(f"{Q0[:-6]}k_proj.lora_A.weight", 4, 48), R.SURPLUS_TENSOR, "k_proj", "not select"
    ),
    "tensors of a layer that is not there": tensors(
        put("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", 4, 48),
        R.SURPLUS_TENSOR,
        "layers.7",
        "no such layer",
    ),
    "keys that do not match": tensors(
        lambda held: held.update({f"module.{name}": held.pop(name) for name in list(held) if name != HEAD_COPY}),
        R.SURPLUS_TENSOR,
        "module.base_model",
        "no such layer",
    ),
    "both ways of writing a name": tensors(
        put(A0.replace(".weight", ".default.weight"), 4, 48), R.SURPLUS_TENSOR, "twice", "lora_A"
    ),
    "another adapter's name": tensors(
        renamed(A0, A0.replace(".weight", ".mine.weight")), R.SURPLUS_TENSOR, "lora_A.mine.weight"
    ),
    "an A of another width": tensors(put(A0, 4, 47), R.SHAPE, A0, "[4, 47]", "must be [4, 48]"),
    "a B of another length": tensors(put(B0, 47, 4), R.SHAPE, B0, "[47, 4]", "must be [48, 4]"),
    "an A of another rank": tensors(put(A0, 5, 48), R.SHAPE, A0, "[5, 48]", "must be [4, 48]"),
    "an A that is turned": tensors(put(A0, 48, 4), R.SHAPE, A0, "[48, 4]"),
    "an A of four axes": tensors(put(A0, 4, 48, 1, 1), R.SHAPE, A0, "[4, 48, 1, 1]"),
    "integers": tensors(put(A0, 4, 48, dtype=torch.int8), R.DTYPE, A0, "I8", "F32, F16, BF16"),
    "doubles": tensors(put(A0, 4, 48, dtype=torch.float64), R.DTYPE, A0, "F64"),
    "bytes of eight bits": tensors(put(B0, 48, 4, dtype=torch.float8_e4m3fn), R.DTYPE, B0, "F8_E4M3"),
    "NaN": tensors(in_rows(A0, 2, 7, float("nan")), R.NOT_FINITE, A0, "nan at [2, 7]"),
    "infinity": tensors(in_rows(B0, 47, 0, float("-inf")), R.NOT_FINITE, B0, "-inf times 2 at [47, 0]"),
    "a magnitude of DoRA": tensors(put(f"{Q0}.lora_magnitude_vector", 64), R.DORA, "lora_magnitude_vector"),
    "an embedding's update": tensors(
        put("base_model.model.model.embed_tokens.lora_embedding_A", 4, 320), R.EMBEDDING, "lora_embedding_A"
    ),
    "a bias of an update": tensors(put(f"{Q0}.lora_B.bias", 64), R.LORA_BIAS, "lora_B.bias"),
    "a bias of the base model": tensors(put(f"{Q0}.base_layer.bias", 64), R.BIAS, "base_layer.bias"),
    "tokens of their own": tensors(
        put("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", 2, 48), R.TRAINABLE_TOKENS
    ),
    "a layer that is replaced": tensors(
        put("base_model.model.model.layers.0.mlp.up_proj.weight", 64, 48), R.SURPLUS_TENSOR, "up_proj", "replaces"
    ),
    "a layer that is saved": tensors(
        put("base_model.model.score.modules_to_save.weight", 2, 48), R.MODULES_TO_SAVE, "score"
    ),
    "experts": tensors(
        put("base_model.model.model.layers.0.mlp.experts.3.w1.lora_A.weight", 4, 48), R.EXPERTS, "experts.3.w1"
    ),
    "an lm_head of another model": tensors(
        lambda held: held[HEAD_COPY].add_(0.1), R.BASE_WEIGHT, HEAD_COPY, "differs from the base model's lm_head.weight"
    ),
    "an lm_head of more tokens": tensors(put(HEAD_COPY, 328, 48), R.SHAPE, HEAD_COPY, "[328, 48]", "must be [320, 48]"),
    "embeddings of more tokens": tensors(
        put("base_model.model.model.embed_tokens.weight", 328, 48), R.SHAPE, "embed_tokens", "[328, 48]"
    ),
}
