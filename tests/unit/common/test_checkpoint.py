"""Errors that a checkpoint's files reveal are reported at once, with the fix."""

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from penstock_common.checkpoint import has_experts, longest_sequence, problem

MODEL = Path(__file__).resolve().parents[3] / "examples/demo_model/penstock-tiny"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def configure(checkpoint: Path, **changes: Any) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_whole_checkpoint_has_no_problem(checkpoint: Path) -> None:
    assert problem(str(checkpoint)) == ""


@pytest.mark.parametrize("model", ["gpt2", "org/name"])
def test_what_may_be_an_id_on_the_hub_has_none(model: str) -> None:
    assert problem(model) == ""


@pytest.mark.parametrize("path", ["/no/such/model", "./nothing-here", "~/nothing-here", "a/b/c"])
def test_a_path_must_exist(path: str) -> None:
    assert f"{path!r} does not exist; give a checkpoint directory" in problem(path)


def test_a_file_is_no_model(checkpoint: Path) -> None:
    assert "is a file; give the directory" in problem(f"{checkpoint}/model.safetensors")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("adapter_config.json", "is a LoRA adapter, not a model"),
        ("model-q4.gguf", "contains GGUF files, which are not supported"),
        ("notes.txt", "has no config.json"),
    ],
)
def test_without_a_configuration_it_is_said_what_was_found_instead(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).write_text("{}")
    assert said in problem(str(tmp_path))


@pytest.mark.parametrize(("text", "said"), [("{", "config.json: "), ("[]", "config.json must contain a JSON object")])
def test_a_configuration_that_cannot_be_read(checkpoint: Path, text: str, said: str) -> None:
    (checkpoint / "config.json").write_text(text)
    assert said in problem(str(checkpoint))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "the quantization of this checkpoint is not supported (hqq); supported: fp8, fbgemm_fp8, compressed-tensors, awq, "
            "gptq, mxfp4; give such a checkpoint",
        ),
        (
            {"is_encoder_decoder": True},
            "LlamaForCausalLM is not supported: it is an encoder-decoder model, and of these only Whisper is supported",
        ),
        ({"model_type": "florence2", "text_config": {"is_encoder_decoder": True}}, "it is an encoder-decoder model"),
        ({"vision_config": {}}, "it is a multimodal or composite model (vision_config)"),
    ],
)
def test_an_architecture_that_is_not_served(checkpoint: Path, changes: dict[str, Any], said: str) -> None:
    configure(checkpoint, **changes)
    assert said in problem(str(checkpoint))


def test_whisper_is_served(checkpoint: Path) -> None:
    configure(checkpoint, model_type="whisper", is_encoder_decoder=True)
    assert problem(str(checkpoint)) == ""


@pytest.mark.parametrize("section", ["vision_config", "audio_config", "thinker_config"])
def test_unknown_media_encoders_matter_only_if_they_are_loaded(checkpoint: Path, section: str) -> None:
    configure(checkpoint, model_type="new", **{section: {}})
    assert f"({section}), and the media encoders of its type are unknown; known are aya_vision, " in problem(
        str(checkpoint)
    )
    assert "to serve its text model alone, use --no-media (penstock serve)" in problem(str(checkpoint))
    assert problem(str(checkpoint), media=False) == ""


def test_a_checkpoint_that_brings_its_own_code_speaks_for_itself(checkpoint: Path) -> None:
    configure(checkpoint, vision_config={})
    assert problem(str(checkpoint), trust_remote_code=True) == ""


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_not_the_file(checkpoint: Path, file: str) -> None:
    (checkpoint / file).write_text(POINTER)
    assert f"{file} is a git-LFS pointer, not the file itself; run 'git lfs pull'" in problem(str(checkpoint))


def test_weights_must_be_there(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert "has no weights; expected *.safetensors" in problem(str(checkpoint))


def test_all_files_of_an_index_must_be_there(checkpoint: Path) -> None:
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert "2 weight files are missing, for example model-00001-of-00002.safetensors" in problem(str(checkpoint))


@pytest.mark.parametrize("size", [0, 4, 20, 100_000])
def test_weights_that_were_not_downloaded_whole_are_noticed(checkpoint: Path, size: int) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert "model.safetensors has " in problem(str(checkpoint))
    assert "download it again" in problem(str(checkpoint))


def test_weights_that_are_something_else_are_noticed(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]")
    assert "model.safetensors has a header that cannot be read" in problem(str(checkpoint))


def test_a_tokenizer_must_be_there_for_those_who_need_one(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    assert "has no tokenizer; expected tokenizer.json" in problem(str(checkpoint))
    assert problem(str(checkpoint), tokenizer=False) == ""


@pytest.mark.parametrize("text", ["[" * (1 << 20), '{"a":' * 80 + "1" + "}" * 80])
def test_a_configuration_without_bottom_is_named(checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text)
    assert "config.json: the JSON is nested more than 64 levels deep" in problem(str(checkpoint))
    assert has_experts(str(checkpoint)) is None


def test_a_header_without_bottom_is_named(checkpoint: Path) -> None:
    text = b"[" * (1 << 20)
    (checkpoint / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert "model.safetensors has a header that cannot be read" in problem(str(checkpoint))


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("config.json", "loop"),
        ("config.json", "pipe"),
        ("model.safetensors", "loop"),
        ("model.safetensors", "pipe"),
        ("tokenizer.json", "pipe"),
    ],
)
def test_special_files_are_named_and_not_waited_for(checkpoint: Path, file: str, kind: str) -> None:
    (checkpoint / file).unlink()
    if kind == "pipe":
        os.mkfifo(checkpoint / file)
    else:
        (checkpoint / file).symlink_to(file)
    assert f"cannot be read: {'Too many' if kind == 'loop' else 'the path is not a regular file'}" in problem(
        str(checkpoint)
    )


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, None),
        ({"max_position_embeddings": 2048, "rope_parameters": {"full": {"rope_type": "dynamic"}}}, None),
        ({"model_type": "mamba"}, None),
        ([], None),
    ],
    ids=str,
)
def test_the_longest_sequence_is_read_from_the_config(tmp_path: Path, config: object, length: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert longest_sequence(str(tmp_path)) == length
    assert longest_sequence("org/model") is None
