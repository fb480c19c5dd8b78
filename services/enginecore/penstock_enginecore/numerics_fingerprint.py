"""What an engine's tokens depend on, by name: engines of one model in which all of it is the same are one variant.

Limits, sizes of blocks, threads, devices and kernels are not in it: with others a request goes on as it would have, up to the
rounding of floating-point numbers. Neither are names of places: the same checkpoint from another directory is the same.
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

from penstock_common.checkpoint import WEIGHT_FILES, looks_like_a_path
from penstock_common.files import MAX_INDEX_BYTES, opened_input, read_input, read_json, read_tensor_header
from penstock_common.observability.logging import get_logger
from penstock_enginecore.config import ModelConfig

_NOT_COMPUTED_WITH = frozenset(
    {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "id2label", "label2id"}
)
"""Keys of config.json that change no token. The dtype that is computed in has a key of its own."""
_PIECE = 4096
_PIECES = 64
_MAX_VALUE = 200
_POOLING_FILES = ("modules.json", "config_sentence_transformers.json", "[0-9]*_*/config.json")


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What of a loaded model its files do not say. ``task``: what it is served for; ``max_len``: tokens of its longest sequence,
    before that is fitted to any memory. ``enable_in_reasoning``: constraints hold in a model's reasoning, too.
    ``tensor_parallel_size``: parts that sums are made of, which rounds them differently. ``cache_dtype``: of
    the numbers in the KV cache, where that is not the model's. ``batch_invariant``: sums have an order of their own.
    """

    dtype: str
    task: str
    max_len: int
    eos_token_ids: frozenset[int]
    enable_in_reasoning: bool = False
    tensor_parallel_size: int = 1
    cache_dtype: str = "auto"
    batch_invariant: bool = False


def config_of(config: ModelConfig, loaded: Loaded) -> dict[str, str]:
    """What the tokens depend on; values longer than 200 characters are given as hashes.

    Weights count by the names, types and shapes of all tensors and 4 KiB from the middle of each: enough to tell any training
    from any other, however the files are cut, and read in milliseconds from what was just loaded.
    """
    values = _settings(config, loaded)
    folder = _folder(config)
    if folder is None:  # nothing that a checkpoint's files could say
        return values | {"weights": config.path}
    if folder.parent.name == "snapshots":  # of the hub's cache: named after the commit, whatever it was asked for by
        values["revision"] = folder.name
    try:
        values["weights"] = "random" if config.load_format == "dummy" else _weights(folder)
        values |= _files(folder, config, pooling=loaded.task != "generate")
        model = read_json(folder / "config.json")
    except (OSError, ValueError) as e:
        get_logger().warning("the checkpoint's files cannot be read again: engines with it are a variant", why=str(e))
        return values | {"weights": f"unreadable: {type(e).__name__}"}
    if rotary_length := _rotary_length(model, config.max_model_len or loaded.max_len):
        values["rotary_length"] = rotary_length
    for key, value in model.items():
        if key not in _NOT_COMPUTED_WITH:
            values[f"config.{key}"] = _short(json.dumps(value, sort_keys=True))
    return values


def _settings(config: ModelConfig, loaded: Loaded) -> dict[str, str]:
    """What settings say. Those that are as they are by default are left out."""
    values = {
        "dtype": loaded.dtype,
        "task": loaded.task,
        "eos_token_ids": json.dumps(sorted(loaded.eos_token_ids)),
    }
    others = {
        "enable_in_reasoning": loaded.enable_in_reasoning and "true",
        "tensor_parallel_size": loaded.tensor_parallel_size > 1 and str(loaded.tensor_parallel_size),
        "cache_dtype": loaded.cache_dtype != "auto" and loaded.cache_dtype,
        "batch_invariant": loaded.batch_invariant and "true",
        "quantization": config.quantization != "auto" and config.quantization,
        "revision": config.revision,
    }
    return values | {key: value for key, value in others.items() if value}


def hash_of(values: Mapping[str, str]) -> str:
    """The hash of what the tokens depend on."""
    return _digest(json.dumps(values, sort_keys=True).encode())


def _folder(config: ModelConfig) -> Path | None:
    """Where the checkpoint lies; for an id on the hub in its cache."""
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        return folder
    if looks_like_a_path(config.path):
        return None
    try:
        file = huggingface_hub.try_to_load_from_cache(config.path, "config.json", revision=config.revision or None)
    except huggingface_hub.errors.HFValidationError:  # no id that the hub could have
        return None
    return Path(file).parent if isinstance(file, str) else None


def _weights(folder: Path) -> str:
    tensors = sorted(entry for file in _weight_files(folder) for entry in _tensors(folder, file))
    return _digest(*(part for entry in tensors for part in entry))


def _weight_files(folder: Path) -> list[Path]:
    """The files that a model is loaded from: not what else lies beside them."""
    modules = sorted(folder.glob("[0-9]*_*/model.safetensors"))
    for index in sorted(folder.glob("model.safetensors.index.json")):
        names = read_json(index, MAX_INDEX_BYTES)["weight_map"].values()
        return [folder / name for name in sorted(set(names))] + modules
    for single in sorted(folder.glob("model.safetensors")):
        return [single, *modules]
    return next((found for pattern in WEIGHT_FILES if (found := sorted(folder.glob(pattern)))), []) + modules


def _tensors(folder: Path, file: Path) -> Iterator[tuple[bytes, bytes]]:
    """What each tensor of a file is and a piece of it; of files without a header pieces of the whole."""
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
    """Hashes of the other files that say how to compute."""
    patterns = {"code": ("*.py",) if config.trust_remote_code else (), "pooling": _POOLING_FILES if pooling else ()}
    return {
        key: _digest(*(part for file in files for part in (file.name.encode(), read_input(file))))
        for key, of_key in patterns.items()
        if (files := sorted(file for pattern in of_key for file in folder.glob(pattern)))
    }


def _rotary_length(model: Mapping[str, Any], length: int) -> str:
    """What the served length makes of rotary scaling that depends on it, see ``models/rope.py``; ``""`` where none does."""
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
    """A hash in which no two lists of parts run into each other."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.hexdigest()
