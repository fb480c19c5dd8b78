"""Names and values of all properties on which an engine's tokens depend. Engines of one model with equal values form
one variant.

Limits, block sizes, threads, devices and kernels are left out. If a request moves to an engine where these properties
differ, the request continues with the same tokens, up to floating-point rounding. File paths are also left out, so a
copy of a checkpoint in another directory counts as the same checkpoint.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.errors
import msgspec

from penstock_common.checkpoint import TOKEN_RULES, WEIGHT_FILES, looks_like_a_path
from penstock_common.files import MAX_INDEX_BYTES, opened_input, read_input, read_json, read_tensor_header
from penstock_common.observability.logging import get_logger
from penstock_enginecore.config import ModelConfig

_NOT_COMPUTED_WITH = frozenset(
    {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "id2label", "label2id"}
)
"""Keys of config.json whose values never change a token. The fingerprint has the dtype of the computation under another
key.
"""
_PIECE = 4096
_PIECES = 64
_MAX_VALUE = 200
_POOLING_FILES = ("modules.json", "config_sentence_transformers.json", "[0-9]*_*/config.json")


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a loaded model that its files do not contain.

    Attributes:
        dtype: The dtype of the computation.
        task: The task for which the model is served.
        max_len: Maximum sequence length in tokens, before the limit is lowered to fit the available memory.
        eos_token_ids: Tokens that end an output.
        enable_in_reasoning: Whether constraints also apply to the model's reasoning.
        tensor_parallel_size: Number of ranks whose partial sums are added. This number changes the rounding of sums.
        cache_dtype: The dtype of the KV cache, or "auto" for the model's dtype.
        fp8_activations: Whether large steps may round activations to 8-bit floats: "auto" or "off".
        batch_invariant: Whether the kernels add numbers in an order that does not depend on the batch.
    """

    dtype: str
    task: str
    max_len: int
    eos_token_ids: frozenset[int]
    enable_in_reasoning: bool = False
    tensor_parallel_size: int = 1
    cache_dtype: str = "auto"
    fp8_activations: str = "auto"
    batch_invariant: bool = False


def config_of(config: ModelConfig, loaded: Loaded) -> dict[str, str]:
    """Return the values on which the tokens depend. Values longer than 200 characters are returned as hashes.

    Weights are identified by the names, dtypes and shapes of all tensors, and by 4 KiB from the middle of each tensor.
    This identification distinguishes different trainings of a model, and does not depend on how the weights are split
    into files. Computing it takes milliseconds, because the files were read just before.
    """
    values = _settings(config, loaded)
    folder = _folder(config)
    if folder is None:  # The checkpoint's folder does not exist, so no file can be read.
        return values | {"weights": config.path}
    if (
        folder.parent.name == "snapshots"
    ):  # Folders in the hub's cache have the name of the commit, whatever revision was requested.
        values["revision"] = folder.name
    try:
        values["weights"] = "random" if config.load_format == "dummy" else _weights(folder)
        values |= _files(folder, config, pooling=loaded.task != "generate")
        model = read_json(folder / "config.json")
        rules = folder / TOKEN_RULES.get(model.get("model_type"), "")
        if rules.is_file():
            values["token_rules"] = _digest(read_input(rules))
    except (OSError, ValueError) as e:
        get_logger().warning(
            "cannot read the checkpoint's files again, so the cluster treats this engine's weights "
            "as different from all other engines' weights",
            reason=str(e),
        )
        return values | {"weights": f"unreadable: {type(e).__name__}"}
    if rotary_length := _rotary_length(model, config.max_model_len or loaded.max_len):
        values["rotary_length"] = rotary_length
    for key, value in model.items():
        if key not in _NOT_COMPUTED_WITH:
            values[f"config.{key}"] = _short(json.dumps(value, sort_keys=True))
    return values


def _settings(config: ModelConfig, loaded: Loaded) -> dict[str, str]:
    """Return the values of settings that differ from their defaults, and the values that have no default."""
    values = {
        "dtype": loaded.dtype,
        "task": loaded.task,
        "eos_token_ids": json.dumps(sorted(loaded.eos_token_ids)),
    }
    others = {
        "enable_in_reasoning": loaded.enable_in_reasoning and "true",
        "tensor_parallel_size": loaded.tensor_parallel_size > 1 and str(loaded.tensor_parallel_size),
        "cache_dtype": loaded.cache_dtype != "auto" and loaded.cache_dtype,
        "fp8_activations": loaded.fp8_activations != "auto" and loaded.fp8_activations,
        "batch_invariant": loaded.batch_invariant and "true",
        "quantization": config.quantization != "auto" and config.quantization,
        "revision": config.revision,
    }
    return values | {key: value for key, value in others.items() if value}


def hash_of(values: Mapping[str, str]) -> str:
    """Return the hash of the values on which the tokens depend."""
    return _digest(json.dumps(values, sort_keys=True).encode())


def _folder(config: ModelConfig) -> Path | None:
    """Return the folder of the checkpoint, or its folder in the hub's cache for a hub id. Returns None if neither
    exists.
    """
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        return folder
    if looks_like_a_path(config.path):
        return None
    try:
        file = huggingface_hub.try_to_load_from_cache(config.path, "config.json", revision=config.revision or None)
    # The path is neither a folder nor a valid id of the Hugging Face hub.
    except huggingface_hub.errors.HFValidationError:
        return None
    return Path(file).parent if isinstance(file, str) else None


def _weights(folder: Path) -> str:
    tensors = sorted(entry for file in _weight_files(folder) for entry in _tensors(folder, file))
    return _digest(*(part for entry in tensors for part in entry))


def _weight_files(folder: Path) -> list[Path]:
    """Return the files from which the model is loaded. Other files in the folder are left out."""
    modules = sorted(folder.glob("[0-9]*_*/model.safetensors"))
    for index in sorted(folder.glob("model.safetensors.index.json")):
        names = read_json(index, MAX_INDEX_BYTES)["weight_map"].values()
        return [folder / name for name in sorted(set(names))] + modules
    for single in sorted(folder.glob("model.safetensors")):
        return [single, *modules]
    return next((found for pattern in WEIGHT_FILES if (found := sorted(folder.glob(pattern)))), []) + modules


def _tensors(folder: Path, file: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield a description and a piece of the bytes of each tensor in a file. For a file without a safetensors header,
    yield pieces of the complete file.
    """
    with opened_input(file) as opened:
        if file.suffix != ".safetensors":
            size = os.fstat(opened.fileno()).st_size
            for place in range(_PIECES):
                opened.seek(size * place // _PIECES)
                yield f"{file.name} {size} {place}".encode(), opened.read(_PIECE)
            return
        length, header = read_tensor_header(opened)
        module = "" if file.parent == folder else f"{file.parent.name}/"
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            opened.seek(8 + length + max(begin, (begin + end - _PIECE) // 2))
            yield f"{module}{name} {entry['dtype']} {entry['shape']}".encode(), opened.read(min(_PIECE, end - begin))


def _files(folder: Path, config: ModelConfig, *, pooling: bool) -> dict[str, str]:
    """Return a hash of the model's Python code, under the key "code", and a hash of the settings of pooling, under the
    key "pooling". A key is missing if its files do not affect the computation, or if there are no such files.
    """
    patterns = {"code": ("*.py",) if config.trust_remote_code else (), "pooling": _POOLING_FILES if pooling else ()}
    return {
        key: _digest(*(part for file in files for part in (file.name.encode(), read_input(file))))
        for key, of_key in patterns.items()
        if (files := sorted(file for pattern in of_key for file in folder.glob(pattern)))
    }


def _rotary_length(model: Mapping[str, Any], length: int) -> str:
    """Return a text that differs if two served lengths lead to different rotary scaling (see ``models/rope.py``).
    Return ``""`` if the served length has no effect.
    """
    found = model.get("rope_parameters") or model.get("rope_scaling") or {}
    for scaling in (found, *found.values()):
        kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else None
        if kind == "dynamic":
            return str(max(length, model.get("max_position_embeddings") or 0))
        if kind in ("longrope", "su"):
            original = scaling.get("original_max_position_embeddings") or model.get("original_max_position_embeddings")
            return "long" if original is None or length > original else "short"
    return ""


def _short(text: str) -> str:
    return text if len(text) <= _MAX_VALUE else _digest(text.encode())


def _digest(*parts: bytes) -> str:
    """Return a hash of all parts. The hash also covers the length of each part."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.hexdigest()
