"""The cached models with reasons why some cannot be served, and downloads from a local hub."""

import hashlib
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from penstock_local.commands.models import CachedModel, models_table, size_text, why_not

COMMIT = "c" * 40
WEIGHTS = len(b"{}").to_bytes(8, "little") + b"{}"
WHOLE = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": WEIGHTS}


def command(home: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``penstock ARGUMENTS`` in a separate process, because the hub's library reads its settings when it is
    imported.
    """
    return subprocess.run(
        [sys.executable, "-m", "penstock_local", *arguments],
        env={"HF_HOME": str(home), "PATH": "", "HF_HUB_DISABLE_XET": "1", **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def cached(home: Path, name: str, files: dict[str, bytes]) -> None:
    """Write a model into the cache, in the layout of the hub's library."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(COMMIT)
    for file, content in files.items():
        (folder / "snapshots" / COMMIT / file).write_bytes(content)


def test_models_are_listed_with_size_and_what_is_missing(tmp_path: Path) -> None:
    cached(tmp_path, "org/whole", {**WHOLE, "model.safetensors": WEIGHTS + bytes(3 * 1024**2)})
    cached(tmp_path, "org/half", {"config.json": b"{}"})
    done = command(tmp_path, "models")
    assert done.stderr == ""
    half, whole = done.stdout.splitlines()
    assert half.startswith("org/half         2 B  it has no weights; expected *.safetensors")
    assert whole.split() == ["org/whole", "3.0", "MiB", "can", "be", "served"]


def test_models_as_json(tmp_path: Path) -> None:
    cached(tmp_path, "org/whole", WHOLE)
    done = command(tmp_path, "models", "--json")
    assert json.loads(done.stdout) == [{"name": "org/whole", "size": 14, "reason": ""}]


def test_without_a_cache_there_are_no_models(tmp_path: Path) -> None:
    done = command(tmp_path, "models")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "no models are cached; download one with penstock pull MODEL\n"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (WHOLE, ""),
        ({**WHOLE, "config.json": None}, "it has no config.json; it is not a Hugging Face checkpoint directory"),
        ({**WHOLE, "tokenizer.json": None, "vocab.txt": b""}, ""),
        (
            {**WHOLE, "model.safetensors": WEIGHTS[:9]},
            "model.safetensors has 9 bytes, so its header is incomplete; download it again",
        ),
        (
            {**WHOLE, "config.json": b'{"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": true}'},
            "T5ForConditionalGeneration is not supported: it is an encoder-decoder model, and of these only Whisper is "
            "supported; give a decoder-only model",
        ),
        (
            {
                **WHOLE,
                "model.safetensors.index.json": b'{"weight_map": {"a": "model.safetensors", "b": "2.safetensors"}}',
            },
            "1 weight files are missing, for example 2.safetensors; finish the download",
        ),
        (
            {
                **WHOLE,
                "model.safetensors": None,
                "model-00001-of-00002.safetensors": WEIGHTS,
                "model-00002-of-00002.safetensors": WEIGHTS,
            },
            "model.safetensors.index.json is missing; it must list the tensors in each of the 2 files "
            "(model-00001-of-00002.safetensors, ...); finish the download",
        ),
    ],
)
def test_what_keeps_files_from_being_a_model(tmp_path: Path, files: dict[str, bytes | None], reason: str) -> None:
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    assert why_not(tmp_path) == reason


def test_on_a_narrow_terminal_words_and_sizes_stay_whole() -> None:
    reason = "it has no tokenizer; expected tokenizer.json"
    model = CachedModel(name="organisation/a-model-with-a-long-name-7B", size=5 * 1024**3, reason=reason)
    screen = io.StringIO()
    Console(file=screen, width=40).print(models_table([model]))
    lines = screen.getvalue().splitlines()
    assert all(len(line.rstrip()) <= 40 for line in lines)
    assert {"5.0", "GiB", "tokenizer;", "expected"} <= set(screen.getvalue().split())


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (1024**2, "1.0 MiB"), (5 * 1024**3, "5.0 GiB")]
)
def test_sizes_are_read_by_people(size: int, text: str) -> None:
    assert size_text(size) == text


@contextmanager
def hub(files: dict[str, bytes]) -> Iterator[str]:
    """A hub with one model. Yields its address."""

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            name = self.path.partition("?")[0].rpartition("/")[2]
            content = files.get(name) if "/resolve/" in self.path else self._info()
            self.send_response(200 if content is not None else 404)
            if content is not None:
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body and content is not None:
                self.wfile.write(content)

        def _info(self) -> bytes:
            if "/tree/" in self.path:
                tree = [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in files.items()
                ]
                return json.dumps(tree).encode()
            siblings = [{"rfilename": name} for name in files]
            return json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings, "private": False}).encode()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_model_is_downloaded_once_without_what_nobody_reads(tmp_path: Path) -> None:
    with hub({**WHOLE, "pytorch_model.bin": b"no"}) as address:
        done = command(tmp_path, "pull", "org/name", HF_ENDPOINT=address)
    assert (done.returncode, done.stderr) == (0, "")
    folder = Path(done.stdout.strip())
    assert {file.name for file in folder.iterdir()} == {*WHOLE}
    assert "can be served" in command(tmp_path, "models").stdout
    assert command(tmp_path, "pull", "org/name", HF_HUB_OFFLINE="1").stdout == done.stdout


def test_what_cannot_be_served_is_said(tmp_path: Path) -> None:
    with hub({"config.json": b"{}", "tokenizer.json": b"{}"}) as address:
        done = command(tmp_path, "pull", "org/name", HF_ENDPOINT=address)
    assert done.returncode == 1
    assert "org/name was downloaded, but cannot be served: it has no weights" in done.stderr


def test_offline_nothing_is_downloaded(tmp_path: Path) -> None:
    done = command(tmp_path, "pull", "org/name", HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert "the model is not in this machine's cache, and HF_HUB_OFFLINE is set" in done.stderr


def test_a_directory_needs_no_download(tmp_path: Path) -> None:
    done = command(tmp_path, "pull", str(tmp_path))
    assert done.returncode == 2
    assert "this is a local directory; penstock serve can use it directly" in done.stderr
