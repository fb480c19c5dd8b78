"""Compatibility with past releases: ``make lint`` refuses changes that would break clients, and error reasons stay."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from charts.release.artifacts import write_contracts
from tests.contract import words

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
BUF = ROOT / "node_modules" / ".bin" / "buf"
needs_buf = pytest.mark.skipif(not BUF.exists(), reason="no buf (npm install, which make lint does where npm is)")

Change = Callable[[Path], None]


def replaced(file: str, pattern: str, by: str) -> Change:
    """Replace the first match of ``pattern`` in ``file``. Fails without a match."""

    def change(protos: Path) -> None:
        path = protos / "penstock" / file
        text, count = re.subn(pattern, by, path.read_text(), count=1, flags=re.MULTILINE)
        assert count == 1
        path.write_text(text)

    return change


def moved(protos: Path) -> None:
    """Move the package to another version and folder, and update all imports."""
    (protos / "penstock/common/v1").rename(protos / "penstock/common/v2")
    for path in protos.rglob("*.proto"):
        path.write_text(
            path.read_text().replace("penstock.common.v1", "penstock.common.v2").replace("common/v1", "common/v2")
        )


MESSAGES = "inference/v1/messages.proto"
BREAKING = {
    "a field gets another number": replaced(MESSAGES, r"string cache_salt = 7;", "string cache_salt = 70;"),
    "a field is removed": replaced(MESSAGES, r"^  string cache_salt = 7;\n", ""),
    "a field gets another name": replaced(MESSAGES, r"string cache_salt = 7;", "string salt = 7;"),
    "a field gets another type": replaced(MESSAGES, r"uint32 index = 2;", "string index = 2;"),
    "a field becomes repeated": replaced(MESSAGES, r"string lora = 8;", "repeated string lora = 8;"),
    "a field is put into a oneof": replaced(
        MESSAGES, r"^  string cache_salt = 7;", "  oneof salt { string cache_salt = 7; }"
    ),
    "a value is removed": replaced("common/v1/finish.proto", r"^  FINISH_REASON_ABORT = 3;\n", ""),
    "a value gets another number": replaced(
        "common/v1/finish.proto", r"FINISH_REASON_ABORT = 3;", "FINISH_REASON_ABORT = 9;"
    ),
    "a message gets another name": replaced(MESSAGES, r"^message SessionError \{", "message SessionFailure {"),
    "a method is removed": replaced("inference/v1/service.proto", r"^  rpc Score\(.*\n", ""),
    "a method streams no more": replaced(
        "inference/v1/service.proto", r"returns \(stream ChatResponse\)", "returns (ChatResponse)"
    ),
    "a package gets another name": moved,
    "code is generated into another Go package": replaced(MESSAGES, r"penstock.io/protos/", "example.com/protos/"),
    "code is generated into another Java package": replaced(
        MESSAGES, r"io\.penstock\.inference", "com.penstock.inference"
    ),
}
ADDITIONS = {
    "a field": replaced(
        MESSAGES, r"^  string cache_salt = 7;", "  // More.\n  string more = 90;\n  string cache_salt = 7;"
    ),
    "a value": replaced(
        "common/v1/finish.proto",
        r"^  FINISH_REASON_ABORT = 3;",
        "  FINISH_REASON_NEW = 90;\n  FINISH_REASON_ABORT = 3;",
    ),
    "a message and a method": replaced(
        "inference/v1/service.proto",
        r"^service InferenceService \{",
        "service InferenceService {\n  rpc More(ScoreRequest) returns (ScoreResponse);",
    ),
}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the descriptor set of the current contracts, in the format that ``make release`` stores."""
    kept = tmp_path_factory.mktemp("released") / "kept.binpb"
    write_contracts(PROTOS, kept)
    return kept


def gate(tmp_path: Path, image: Path, change: Change) -> subprocess.CompletedProcess[str]:
    """Return buf's findings for a changed contract, under the rules of the next release, without exceptions of past
    ones.
    """
    protos = tmp_path / "protos"
    shutil.copytree(PROTOS / "penstock", protos / "penstock")
    rules = (PROTOS / "buf.yaml").read_text()
    (protos / "buf.yaml").write_text(re.sub(r"^  ignore_only:\n(?:    .*\n)*", "", rules, flags=re.MULTILINE))
    change(protos)
    return subprocess.run(
        [BUF, "breaking", "--against", image], cwd=protos, capture_output=True, text=True, timeout=300
    )


@needs_buf
@pytest.mark.parametrize("change", BREAKING.values(), ids=BREAKING)
def test_the_gate_refuses_what_breaks_clients(tmp_path: Path, image: Path, change: Change) -> None:
    said = gate(tmp_path, image, change)
    assert said.returncode == 100, (
        said.stdout + said.stderr
    )  # buf's exit code for findings; other codes mean that buf failed
    assert ".proto:" in said.stdout


@needs_buf
@pytest.mark.parametrize("change", ADDITIONS.values(), ids=ADDITIONS)
def test_an_addition_passes(tmp_path: Path, image: Path, change: Change) -> None:
    said = gate(tmp_path, image, change)
    assert said.returncode == 0, said.stdout + said.stderr


def test_every_release_has_kept_its_contracts_and_its_words() -> None:
    images = {path.stem for path in words.RELEASED.glob("*.binpb")}
    assert images == {path.name.removesuffix(".words.json") for path in words.RELEASED.glob("*.words.json")} != set()


@pytest.mark.parametrize("kind", ["reasons", "metadata"])
def test_words_of_the_last_release_are_still_spoken(kind: str) -> None:
    promised = json.loads(words.released().read_text())[kind]
    assert promised, "a release without words promises nothing"
    gone = sorted(set(promised) - set(words.current()[kind]))
    assert not gone, f"clients of {words.released().name} know {gone}, which nothing says or takes any more"
