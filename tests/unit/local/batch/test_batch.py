"""``penstock batch`` with a backend that fails on command: finished requests, resumed runs, and errors."""

import json
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from penstock_common.errors import ConfigError, Unavailable
from penstock_local.batch import batch as command
from penstock_local.batch.backend import Answer, Servers
from penstock_local.batch.files import OutputFile
from penstock_local.batch.options import BatchOptions


class Echo(Servers):
    """Answers a body with itself, each one after later ones; 400 if the body asks for it.

    After ``fuse`` answers it raises ``error``.
    """

    urls = ("/v1/completions", "/v1/chat/completions")

    def __init__(self, fuse: int | None = None, error: type[BaseException] = Unavailable) -> None:
        super().__init__(["http://nowhere"])
        self.at_once = 8
        self.asked: list[int] = []
        self._fuse = fuse
        self._error = error

    def submit(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> "Future[Any]":
        if self._error is KeyboardInterrupt and len(self.asked) >= (self._fuse or 0):
            raise KeyboardInterrupt
        return super().submit(work)

    async def post(self, url: str, body: bytes) -> Answer:
        prompt = json.loads(body)["prompt"]
        if self._error is Unavailable and self._fuse is not None and len(self.asked) >= self._fuse:
            raise Unavailable("the engine died")
        self.asked.append(prompt)
        return Answer(400 if json.loads(body).get("bad") else 200, body, f"id-{prompt}")


class Batch:
    """A folder with an input, and runs of the command over it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.input, self.output, self.errors = folder / "in.jsonl", folder / "out.jsonl", folder / "out.errors.jsonl"
        self._monkeypatch = monkeypatch

    def write(self, *lines: object) -> None:
        self.input.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))

    def run(self, backend: Echo, **options: Any) -> int:
        self._monkeypatch.setattr(command, "make_backend", lambda _: backend)
        given = BatchOptions(input=str(self.input), output=str(self.output), server=("http://nowhere",), **options)
        return command.batch(given)

    def ids(self, file: Path | None = None) -> list[str]:
        return [json.loads(line)["custom_id"] for line in (file or self.output).read_text().splitlines()]


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Batch:
    return Batch(tmp_path, monkeypatch)


def line(number: int, **body: Any) -> dict[str, Any]:
    return {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": {"prompt": number, **body}}


def test_answers_stand_in_the_order_of_the_input_with_their_bodies(batch: Batch) -> None:
    batch.write(*map(line, range(100)))
    assert batch.run(Echo()) == 0
    records = [json.loads(text) for text in batch.output.read_text().splitlines()]
    assert [record["custom_id"] for record in records] == [f"c{number}" for number in range(100)]
    assert records[7] == {
        "id": "batch_req_8",
        "custom_id": "c7",
        "response": {"status_code": 200, "request_id": "id-7", "body": {"prompt": 7}},
        "error": None,
    }
    assert not batch.errors.exists()


def test_an_answer_out_of_order_has_its_name(batch: Batch) -> None:
    batch.write(*map(line, range(100)))
    assert batch.run(Echo(), unordered=True) == 0
    assert sorted(batch.ids()) == sorted(f"c{number}" for number in range(100))


@pytest.mark.parametrize("error", [Unavailable, KeyboardInterrupt])
@pytest.mark.parametrize("unordered", [False, True])
def test_an_interrupted_batch_resumes_and_answers_every_line_once(
    batch: Batch, error: type[BaseException], unordered: bool
) -> None:
    chance = random.Random(5)
    batch.write(*(line(number, **({"bad": True} if number % 10 == 3 else {})) for number in range(200)))
    for _ in range(5):
        with pytest.raises(error):
            batch.run(Echo(chance.randrange(1, 30), error), unordered=unordered)
        before = set(batch.ids())
        with batch.output.open("ab") as file:  # a killed program leaves an incomplete line
            file.write(b'{"id":"batch_req_9'[: chance.randrange(18)])
    last = Echo()
    assert batch.run(last, unordered=unordered) == 1
    assert not before & {f"c{number}" for number in last.asked}
    good, bad = batch.ids(), batch.ids(batch.errors)
    if not unordered:
        assert good == [f"c{number}" for number in range(200) if number % 10 != 3]
    assert sorted(good + bad) == sorted(f"c{number}" for number in range(200))
    assert sorted(bad) == sorted(f"c{number}" for number in range(3, 200, 10))


def test_a_batch_that_is_done_asks_for_nothing(batch: Batch) -> None:
    batch.write(line(0), line(1, bad=True))
    assert batch.run(Echo()) == 1
    again = Echo()
    assert batch.run(again) == 1
    assert again.asked == []
    assert batch.run(again, retry_errors=True) == 1
    assert again.asked == [1]
    anew = Echo()
    assert batch.run(anew, overwrite=True) == 1
    assert sorted(anew.asked) == [0, 1]


def test_a_batch_ends_with_its_tokens_and_says_when_nothing_was_left(
    batch: Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch.write(*(line(number, usage={"prompt_tokens": 3, "completion_tokens": number}) for number in range(5)))
    assert batch.run(Echo()) == 0
    said = capsys.readouterr().err
    assert "5 lines in " in said
    assert " s: 15 prompt tokens, 10 output tokens, " in said
    assert " output tokens/s\n" in said
    assert batch.run(Echo()) == 0
    assert "nothing to do: an earlier run has done every line" in capsys.readouterr().err


def test_lines_that_are_wrong_are_in_the_error_file_with_what_is_wrong(batch: Batch) -> None:
    batch.write(
        line(0),
        "no json",
        "",
        {**line(7), "url": "/v1/chat/completions", "body": {"input": "hi"}},
        {**line(1), "url": "/v1/completion"},
        {**line(6), "url": "/v1/responses", "body": {"input": "hi"}},
        {**line(2), "method": "GET"},
        line(3, stream=True),
        {"url": "/v1/completions", "body": {}},
        {**line(4), "body": 5},
        line(5),
    )
    assert batch.run(Echo()) == 1
    assert batch.ids() == ["c0", "c5"]
    wrong = [json.loads(text) for text in batch.errors.read_text().splitlines()]
    assert [(each["id"], each["error"]["message"][:38]) for each in wrong] == [
        ("batch_req_2", "not valid JSON: JSON is malformed: inv"),
        ("batch_req_4", "body.input is set, as for /v1/response"),
        ("batch_req_5", "url is '/v1/completion'; known: /v1/co"),
        ("batch_req_6", "url is '/v1/responses'; known: /v1/com"),
        ("batch_req_7", "method is 'GET'; it must be 'POST'"),
        ("batch_req_8", "body.stream is true; a batch has compl"),
        ("batch_req_9", "object missing required field `custom_"),
        ("batch_req_10", "body: expected `object`, got `int`"),
    ]
    for each in (wrong[1], wrong[3]):
        assert "use body.messages instead of input" in each["error"]["message"]
        assert "did you mean" not in each["error"]["message"]


def test_two_lines_of_one_name_are_refused_before_anything_is_asked(batch: Batch) -> None:
    batch.write(line(0), line(1), "", line(2), line(1), line(0))
    backend = Echo()
    with pytest.raises(ConfigError, match="in.jsonl: line 5 has the same custom_id 'c1' as line 2"):
        batch.run(backend)
    assert backend.asked == []
    assert not batch.output.exists()


def test_a_byte_order_mark_is_skipped(batch: Batch) -> None:
    batch.write(line(0), line(1))
    batch.input.write_bytes(b"\xef\xbb\xbf" + batch.input.read_bytes())
    assert batch.run(Echo()) == 0
    assert batch.ids() == ["c0", "c1"]
    assert batch.run(Echo(fuse=0)) == 0  # the batch finds the completed lines again


def test_files_that_do_not_fit_are_refused(batch: Batch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"in\.jsonl cannot be read: No such file or directory"):
        batch.run(Echo())
    batch.write()
    with pytest.raises(ConfigError, match="has no lines: there is nothing to do"):
        batch.run(Echo())
    batch.write(line(0), line(1))
    batch.run(Echo())
    batch.write(line(1), line(0))
    with pytest.raises(
        ConfigError, match=r"has an answer to 'c0' for line 1, but this line of .*in\.jsonl has another custom_id"
    ):
        batch.run(Echo())
    batch.output.write_text("a diary\n")
    with pytest.raises(ConfigError, match="has a line that is not a record of a batch"):
        batch.run(Echo())
    with (
        OutputFile(str(batch.output), overwrite=False),
        pytest.raises(ConfigError, match="is being written by another program"),
    ):
        batch.run(Echo())
    batch.input.unlink()
    batch.input.mkdir()
    with pytest.raises(ConfigError, match="is a directory, not a file of requests"):
        batch.run(Echo())


def test_urls_are_read_and_written_when_all_is_done(
    batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = fsspec.filesystem("memory")
    files.pipe("/in.jsonl", "".join(json.dumps(line(number)) + "\n" for number in range(20)).encode())
    options = BatchOptions(input="memory://in.jsonl", output="memory://out.jsonl", server=("http://nowhere",))
    for backend in (Echo(5), Echo()):
        monkeypatch.setattr(command, "make_backend", lambda _, backend=backend: backend)
        if backend._fuse:
            with pytest.raises(Unavailable):
                command.batch(options)
            assert not files.exists("/out.jsonl")
        else:
            assert command.batch(options) == 0
            assert len(backend.asked) < 20
    written = files.cat("/out.jsonl").decode().splitlines()
    assert [json.loads(text)["custom_id"] for text in written] == [f"c{number}" for number in range(20)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give --model to run a model here, or --server"),
        ({"model": "m", "server": ("http://a",)}, "not both"),
        ({"model": "m", "output": "in.jsonl"}, "the input, the output and the error file must differ"),
        ({"server": ("http://a",), "dtype": "float32"}, "--dtype applies to an engine in this process"),
        ({"server": ("http://a",), "lora": {"a": "/a"}}, "--lora applies to an engine in this process"),
        ({"model": "m", "concurrency": 0}, "--concurrency is 0"),
    ],
)
def test_flags_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BatchOptions(**{"input": "in.jsonl", "output": "out.jsonl", **options})
    with pytest.raises(ConfigError, match="--server is 'localhost:8000'; it must begin with http://"):
        Servers(["localhost:8000"])
