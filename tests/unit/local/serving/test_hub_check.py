"""Before anything starts, the hub is asked whether it has a model that is no directory."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

CHECK = (
    "import sys; from penstock_local.serving.hub_check import check_hub; from penstock_common.errors import ConfigError\n"
    "try: check_hub('org/name', revision=sys.argv[1])\n"
    "except ConfigError as e: print(e)"
)


def said(cache: Path, revision: str = "", **environ: str) -> str:
    """Return the message about a model, from a separate process: the hub's library reads its settings at import."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK, revision],
        env={"HF_HOME": str(cache), "PATH": "", **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@contextmanager
def hub(status: int, code: str) -> Iterator[str]:
    """Run a hub that gives the same answer to every request. Yields its address."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_model_in_the_cache_needs_no_network(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--org--name/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "hub/models--org--name/refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    assert said(tmp_path, HF_ENDPOINT="http://127.0.0.1:9") == ""


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    message = said(tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "the hub cannot be reached" in message
    assert "give the directory of a checkpoint" in message


def test_offline_is_said_by_the_variable_that_makes_it_so(tmp_path: Path) -> None:
    assert "HF_HUB_OFFLINE is set" in said(tmp_path, HF_HUB_OFFLINE="1")


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (404, "RepoNotFound", "the hub has no public model of this name; set HF_TOKEN"),
        (403, "GatedRepo", "this model is gated"),
        (404, "RevisionNotFound", "the hub has no revision 'v9' of this model"),
    ],
)
def test_errors_of_the_hub_are_reported_with_the_fix(tmp_path: Path, status: int, code: str, message: str) -> None:
    with hub(status, code) as address:
        assert message in said(tmp_path, revision="v9", HF_ENDPOINT=address)
