"""Early checks of a checkpoint's files. The checks read only headers and JSON: no weights, no torch, no network."""

import os
import re
from pathlib import Path
from typing import Any

from penstock_common import files as input_files
from penstock_common.errors import nearest

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_SHARD = re.compile(r".*-\d+-of-\d+\.(safetensors|bin)")
QUANTIZATIONS = ("fp8", "fbgemm_fp8", "compressed-tensors", "awq", "gptq", "mxfp4")
"""Values of ``quant_method`` of the supported quantization methods. Some variants of a method may be unsupported."""
WITH_TOWERS = (
    "aya_vision",
    "gemma3",
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "gemma4",
    "gemma4_unified",
    "idefics3",
    "internvl",
    "llama4",
    "llava",
    "llava_next",
    "llava_onevision",
    "mistral3",
    "paddleocr_vl",
    "qwen2_5_omni",
    "qwen2_5_vl",
    "qwen2_audio",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_asr",
    "qwen3_omni_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
    "voxtral",
)
"""Values of ``model_type`` of the supported models that accept images or audio."""
TOKEN_RULES = {"whisper": "generation_config.json"}
"""Files with a model's own rules for output tokens, by ``model_type``."""
ENCODER_DECODERS = ("whisper",)
"""Values of ``model_type`` of the supported encoder-decoder models."""
TEXT_ALONE = (
    "to serve its text model alone, use --no-media (penstock serve), media=False (LLM), or multimodal.enabled: false (engine) "
    "with media.enabled: false (frontend)"
)
"""Text of the remedy for a model whose media encoders are not supported, but whose text model is supported."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "vocab.json", "vocab.txt", "*.spm", "*.vocab")
_LFS_POINTER = b"version https://git-lfs"
_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)
"""Keys of config.json whose value is the number of experts."""
_DYNAMIC = "dynamic"
"""Kind of rotary scaling that allows longer sequences than ``max_position_embeddings``."""
_PARTS = ("vision_config", "audio_config", "text_config", "thinker_config")
"""Keys of config.json with the configurations of a composite model's parts, such as its vision encoder."""


def looks_like_a_path(model: str) -> bool:
    """Return whether ``model`` can only be a directory. Other values may be model IDs on the Hugging Face Hub."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def no_directory(path: str) -> str:
    """Return the error for a missing directory ``path``. The error suggests the most similar name at that location."""
    folder = Path(path).expanduser()
    siblings = [each.name for each in folder.parent.iterdir()] if folder.parent.is_dir() else []
    return f"no such directory{nearest(folder.name, siblings)}"


def problem(
    path: str, *, trust_remote_code: bool = False, tokenizer: bool = True, weights: bool = True, media: bool = True
) -> str:
    """Return the reason why the model at ``path`` cannot be served, and the fix.

    Returns ``""`` if the files show no problem, or if ``path`` may be a model ID on the hub.

    Args:
        path: Directory of the checkpoint, or a model ID.
        trust_remote_code: Whether the checkpoint's own modeling code is used. If so, the architecture is not checked.
        tokenizer: Whether the checkpoint must have a tokenizer.
        weights: Whether the checkpoint must have weights.
        media: Whether the checkpoint's media encoders must be supported. If not, only the checkpoint's text model is
            served.
    """
    folder = Path(path).expanduser()
    try:
        if not folder.exists():
            wrong = f"{path!r} does not exist; give a checkpoint directory or a Hugging Face model id"
            return wrong if looks_like_a_path(path) else ""
        if not folder.is_dir():
            return f"{path!r} is a file; give the directory that contains config.json and the weights"
        return (
            _configuration(path, folder, check=not trust_remote_code, media=media)
            or (_weights(path, folder) if weights else "")
            or (_tokenizer(path, folder) if tokenizer else "")
        )
    except OSError as e:
        return f"{path!r} cannot be read: {e.strerror}: {e.filename}"


def has_experts(path: str) -> bool | None:
    """Return whether the model at ``path`` is a mixture-of-experts model, or None if config.json does not show whether
    the model has experts.
    """
    config = _config_at(path)
    return None if config is None else any(isinstance(n := config.get(key), int) and n > 1 for key in _EXPERTS)


def longest_sequence(path: str) -> int | None:
    """Return the number of tokens of the longest sequence that the model at ``path`` allows, or None if config.json does
    not show this number.

    With dynamic scaling of rotary frequencies, the engine computes the limit.
    """
    config = _config_at(path) or {}
    parts = [config, *(part for key in _PARTS if isinstance(part := config.get(key), dict))]
    if any(_DYNAMIC in str(part.get(key)) for part in parts for key in ("rope_scaling", "rope_parameters")):
        return None
    lengths = [n for part in parts if isinstance(n := part.get("max_position_embeddings"), int)]
    return max(lengths, default=None)


def _config_at(path: str) -> dict[str, Any] | None:
    """Return the object in config.json of the directory ``path``, or None if there is no such object."""
    try:
        config = input_files.read_json(Path(path).expanduser() / "config.json")
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _configuration(path: str, folder: Path, *, check: bool, media: bool) -> str:
    """Return a problem of config.json, or ''. If ``check`` is true, also check the architecture in config.json."""
    file = folder / "config.json"
    if not os.path.lexists(file):
        if (folder / "adapter_config.json").is_file():
            return f"{path!r} is a LoRA adapter, not a model: it has adapter_config.json and no config.json"
        if any(folder.glob("*.gguf")):
            return f"{path!r} contains GGUF files, which are not supported; give the Hugging Face checkpoint they were made from"
        return f"{path!r} has no config.json; it is not a Hugging Face checkpoint directory"
    if _is_pointer(file):
        return _pointer(path, file)
    try:
        config = input_files.read_json(file)
    except ValueError as e:
        return f"{path!r}: the configuration cannot be read: config.json: {e}"
    if not isinstance(config, dict):
        return f"{path!r}: the configuration cannot be read: config.json must contain a JSON object"
    return _architecture(path, config, media=media) if check else ""


def _architecture(path: str, config: dict[str, Any], *, media: bool) -> str:
    named = ", ".join(map(str, config.get("architectures") or ())) or str(config.get("model_type", "a model"))
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "") if isinstance(quantization, dict) else ""
        if method not in QUANTIZATIONS:
            return (
                f"{path!r}: the quantization of this checkpoint is not supported{method and f' ({method})'}; supported: "
                f"{', '.join(QUANTIZATIONS)}; give such a checkpoint, or one in bfloat16, float16 or float32"
            )
    if config.get("model_type") not in ENCODER_DECODERS and _is_encoder_decoder(config):
        return (
            f"{path!r}: {named} is not supported: it is an encoder-decoder model, and of these only Whisper is supported; give "
            "a decoder-only model"
        )
    parts = [part for part in _PARTS if isinstance(config.get(part), dict)]
    if media and parts and config.get("model_type") not in WITH_TOWERS:
        return (
            f"{path!r}: {named} is not supported: it is a multimodal or composite model ({', '.join(parts)}), and the media "
            f"encoders of its type are unknown; known are {', '.join(WITH_TOWERS)}; {TEXT_ALONE}, if its text model is supported"
        )
    return ""


def _is_encoder_decoder(config: dict[str, Any]) -> bool:
    """Return whether a model, or its text model, has an encoder whose outputs the decoder reads by cross-attention."""
    text = config.get("text_config")
    return any(bool(part.get("is_encoder_decoder")) for part in (config, text) if isinstance(part, dict))


def _weights(path: str, folder: Path) -> str:
    files = sorted(file for pattern in WEIGHT_FILES for file in folder.glob(pattern))
    if missing := _missing_shards(folder):
        return f"{path!r}: {len(missing)} weight files are missing, for example {missing[0]}; finish the download"
    if not files:
        return f"{path!r} has no weights; expected *.safetensors or pytorch_model*.bin files"
    if index := _missing_index(folder, files):
        return (
            f"{path!r}: {index} is missing; it must list the tensors in each of the {len(files)} files ({files[0].name}, ...); "
            "finish the download"
        )
    for file in files:
        if _is_pointer(file):
            return _pointer(path, file)
        if file.suffix == ".safetensors" and (reason := _cut_off(file)):
            return f"{path!r}: {file.name} {reason}; download it again"
    return ""


def _missing_index(folder: Path, files: list[Path]) -> str:
    """Return the name of the missing index of sharded weights, or '' if the index exists or is not needed."""
    first = files[0].name
    if not _SHARD.fullmatch(first) or (folder / "model.safetensors").is_file():
        return ""
    index = "model.safetensors.index.json" if first.endswith(".safetensors") else "pytorch_model.bin.index.json"
    return "" if (folder / index).is_file() else index


def _missing_shards(folder: Path) -> list[str]:
    names: set[str] = set()
    for index in folder.glob("*.safetensors.index.json"):
        try:
            content = input_files.read_json(index, input_files.MAX_INDEX_BYTES)
        except ValueError:
            continue
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        names.update(map(str, weight_map.values()) if isinstance(weight_map, dict) else ())
    return sorted(name for name in names if not (folder / name).is_file())


def _cut_off(file: Path) -> str:
    """Return an error if a safetensors file is shorter than its header says, else ''.

    The file consists of an 8-byte length, a JSON header of that length, and the tensors.
    """
    with input_files.opened_input(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > size - 8:
            return f"has {size} bytes, so its header is incomplete"
        opened.seek(0)
        try:
            _, header = input_files.read_tensor_header(opened)
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return "has a header that cannot be read"
    return f"has {size} bytes, but its header requires {8 + length + end}" if 8 + length + end > size else ""


def _tokenizer(path: str, folder: Path) -> str:
    files = sorted(file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern))
    for file in files:
        if _is_pointer(file):
            return _pointer(path, file)
    if files:
        return ""
    return f"{path!r} has no tokenizer; expected tokenizer.json, tokenizer.model or a vocabulary in that directory"


def _is_pointer(file: Path) -> bool:
    with input_files.opened_input(file) as opened:
        return opened.read(len(_LFS_POINTER)) == _LFS_POINTER


def _pointer(path: str, file: Path) -> str:
    return f"{path!r}: {file.name} is a git-LFS pointer, not the file itself; run 'git lfs pull' in that directory"
