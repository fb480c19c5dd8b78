"""The message for the user once all services are up."""

import json
import re
import shlex
import stat
from pathlib import Path

import pytest
from google.protobuf import json_format

from penstock.inference.v1 import messages_pb2
from penstock_client import Model
from penstock_common.security.shared_secret import load_secret
from penstock_local.serving.serve import ready_block, secret_file
from penstock_local.serving.serve_options import ServeOptions


def block(*capabilities: str) -> str:
    model = Model(name="m", max_model_len=512, num_engines=1, capabilities=capabilities)
    return ready_block(ServeOptions(model="org/m"), [model], seconds=1.0)


def test_each_of_several_frontends_is_listed_with_its_own_ports() -> None:
    model = Model(name="m", max_model_len=512, num_engines=1, capabilities=())
    said = ready_block(ServeOptions(model="org/m", frontends=2), [model], seconds=1.0)
    assert "frontend-0: admin localhost:50053, metrics http://localhost:8001/metrics" in said
    assert "frontend-1: admin localhost:50054, metrics http://localhost:8002/metrics" in said


def test_adapters_are_named_in_the_first_words() -> None:
    model = Model(name="m", max_model_len=512, num_engines=1, capabilities=())
    few = ServeOptions(model="org/m", lora={"poet": "/a/poet", "json": "/a/json"}, lora_directory="/live")
    assert "\n    LoRA    json, poet, those in /live (8 at once)\n" in ready_block(few, [model], seconds=1.0)
    many = ServeOptions(
        model="org/m", lora={f"a{i}": "/a" for i in range(9)}, settings={"engine": {"lora.max_loras": 2}}
    )
    assert "\n    LoRA    a0, a1, a2, a3, a4, a5, a6, a7, ... (2 at once)\n" in ready_block(many, [model], seconds=1.0)
    assert "LoRA" not in block()


@pytest.mark.parametrize("capabilities", [(), ("generate", "prefix_caching")])
def test_a_model_that_generates_is_tried_by_generating(capabilities: tuple[str, ...]) -> None:
    assert 'penstock generate "Once upon a time"' in block(*capabilities)
    assert "penstock chat" in block(*capabilities)


def test_a_model_that_embeds_is_tried_by_embedding() -> None:
    said = block("embed", "token_embed")
    assert "penstock generate" not in said
    command = shlex.split(re.search(r"curl .*", said)[0])  # type: ignore[index]
    assert command[1] == "http://localhost:8000/v1/embeddings"
    assert json.loads(command[-1]) == {"model": "m", "input": "Once upon a time"}


@pytest.mark.parametrize(("capability", "method"), [("classify", "Classify"), ("score", "Score")])
def test_other_models_are_tried_by_what_they_do(capability: str, method: str) -> None:
    command = shlex.split(re.search(r"grpcurl .*", block(capability))[0])  # type: ignore[index]
    assert command[-1] == f"penstock.inference.v1.InferenceService/{method}"
    json_format.Parse(command[3], getattr(messages_pb2, f"{method}Request")())


# The file with the common secret of one command's engines.


def test_the_file_is_of_this_user_alone_and_goes_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    with secret_file(wanted=True) as path:
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
        assert load_secret(path) is not None
        with secret_file(wanted=True) as other:
            assert Path(other).read_text() != Path(path).read_text()
    assert not Path(path).parent.exists()
    assert "secret" not in "".join(capfd.readouterr())


def test_the_file_goes_when_the_command_fails_too() -> None:
    paths = []

    def fail() -> None:
        with secret_file(wanted=True) as path:
            paths.append(Path(path))
            raise RuntimeError("a service died")

    with pytest.raises(RuntimeError):
        fail()
    assert not paths[0].parent.exists()


def test_where_none_is_wanted_there_is_no_file() -> None:
    with secret_file(wanted=False) as path:
        assert path == ""
