"""``penstock bench``: the load that it sends to a real gRPC server without a model, and its report."""

import asyncio
import json
import signal
import sys
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock_client import Model
from penstock_common.errors import ConfigError
from penstock_local.bench.dataset import random_dataset
from penstock_local.bench.options import BenchOptions, Range, parse_range
from penstock_local.bench.report import Record, as_json, latencies, make_report, percentile, summary_rows
from penstock_local.cli import main
from penstock_local.serving.machine_resources import free_ports
from tests.fakes.clients.command import PENSTOCK
from tests.fakes.frontends.fake_inference import BUSY, HOLD, FakeInference
from tests.fakes.patience import PATIENCE

MODEL = Model(name="m", max_model_len=512, num_engines=1, vocab_size=300)


@pytest.fixture
async def server() -> AsyncIterator[FakeInference]:
    fake = FakeInference()
    await fake.start()
    yield fake
    await fake.stop()


async def bench(server: FakeInference, *flags: str) -> int:
    return await asyncio.to_thread(main, ["bench", "--address", server.address, *flags])


async def test_a_closed_loop_sends_every_request_and_counts_its_tokens(
    server: FakeInference, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--requests", "20", "--concurrency", "4", "--warmup", "3", "--input-len", "5:9", "--output-len", "6")
    assert await bench(server, *flags, "--json", "-") == 0
    out, err = capsys.readouterr()
    results = json.loads(out)["results"]
    assert (results["requests"], results["succeeded"], results["failures"]) == (20, 20, {})
    assert results["output_tokens"] == 120
    assert 1 <= results["peak_streams"] <= 4
    assert "20 of 20" in err
    assert len(server.requests) == 23
    lengths = {len(request.token_ids.ids) for request in server.requests}
    assert lengths <= set(range(5, 10))
    assert len(lengths) > 1
    params = server.requests[0].sampling_params
    assert (params.max_tokens, params.ignore_eos, params.temperature) == (6, True, 0.0)


async def test_the_load_is_the_same_for_the_same_seed(server: FakeInference) -> None:
    for seed in ("1", "1", "2"):
        await bench(server, "--requests", "3", "--concurrency", "1", "--input-len", "4", "--bench-seed", seed)
    sent = [tuple(request.token_ids.ids) for request in server.requests]
    assert sent[:5] == sent[5:10] != sent[10:]


async def test_requests_come_at_random_times_with_a_rate(
    server: FakeInference, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--rate", "2000", "--requests", "30", "--output-len", "2", "--channels", "2")
    assert await bench(server, *flags, "--json", "-") == 0
    starts = [request["start"] for request in json.loads(capsys.readouterr().out)["requests"]]
    assert len(starts) == 30
    assert starts == sorted(starts)
    assert len(set(starts)) == 30


async def test_a_duration_ends_the_sending(server: FakeInference, capsys: pytest.CaptureFixture[str]) -> None:
    assert await bench(server, "--duration", "0.2", "--output-len", "2", "--json", "-") == 0
    results = json.loads(capsys.readouterr().out)
    assert results["results"]["succeeded"] == results["results"]["requests"] > 0


async def test_the_prompts_of_a_text_file_are_used_over_and_over(server: FakeInference, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one two\n\nthree\n")
    await bench(server, "--prompts", str(file), "--requests", "3", "--concurrency", "1", "--warmup", "0")
    assert [request.text for request in server.requests] == ["one two", "three", "one two"]


async def test_the_prompts_of_a_jsonl_file_have_lengths_of_their_own(server: FakeInference, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one", "max_tokens": 3, "id": 7}\n{"prompt": [11, 12]}\n')
    flags = ("--prompts", str(file), "--requests", "2", "--concurrency", "1", "--warmup", "0", "--output-len", "5")
    await bench(server, *flags)
    first, second = server.requests
    assert (first.text, first.sampling_params.max_tokens) == ("one", 3)
    assert (list(second.token_ids.ids), second.sampling_params.max_tokens) == ([11, 12], 5)


async def test_conversations_are_asked_with_the_lengths_of_their_answers(
    server: FakeInference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ShareGPT.json"
    turns = [{"from": "human", "value": "one two three four"}, {"from": "gpt", "value": "5 6 7 8 9"}]
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    flags = ("--dataset", "sharegpt", "--dataset-path", str(file), "--requests", "2", "--warmup", "0")
    assert await bench(server, *flags) == 0
    assert {(request.text, request.sampling_params.max_tokens) for request in server.requests} == {
        ("one two three four", 5)
    }
    assert "1 of 2 conversations of ShareGPT.json" in capsys.readouterr().err


async def test_answers_of_json_are_counted_by_their_schema(
    server: FakeInference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = {"type": "object", "required": ["n"]}
    file = tmp_path / "schemas.jsonl"
    file.write_text("".join(json.dumps({"schema": schema, "prompt": p}) + "\n" for p in ('{"n": 1}', "{}", '{"n')))
    flags = ("--dataset", "json-schema", "--dataset-path", str(file), "--requests", "3", "--warmup", "0")
    assert await bench(server, *flags, "--json", "-") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["results"]["json_answers"] == {"answers": 3, "parse": 2, "validate": 1}
    assert "2 of 3 answers parse, 1 follow their schema" in err
    assert "2 answers do not match their JSON schema; the first: $: 'n' is a required property" in err
    params = server.requests[0].sampling_params
    assert json.loads(params.structured_output.json_schema) == schema
    assert not params.ignore_eos


async def test_failures_are_counted_by_their_code_and_make_the_exit_code_1(
    server: FakeInference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"fine\n{BUSY}\n")
    flags = ("--prompts", str(file), "--requests", "4", "--warmup", "0", "--json", str(tmp_path / "out.json"))
    assert await bench(server, *flags) == 1
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert (results["succeeded"], results["failures"]) == (2, {"RESOURCE_EXHAUSTED": 2})
    assert "2 requests ended as RESOURCE_EXHAUSTED: the queue is full" in capsys.readouterr().err


async def test_a_failing_warm_up_measures_nothing(server: FakeInference, capsys: pytest.CaptureFixture[str]) -> None:
    assert await bench(server, "--temperature", "200") == 1
    err = capsys.readouterr().err
    assert "sampling_params.temperature is 200" in err
    assert "Nothing was measured" in err


async def test_ctrl_c_reports_what_was_measured(server: FakeInference, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"fine enough\nheld {HOLD}\n")
    process = await asyncio.create_subprocess_exec(
        *PENSTOCK,
        *("bench", "--address", server.address, "--prompts", str(file), "--warmup", "0", "--concurrency", "1"),
        *("--json", "-"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE):
        while len(server.requests) < 2:
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
        await server.abandoned.wait()
    assert process.returncode == 130
    results = json.loads(out)["results"]
    assert (results["succeeded"], results["failures"]) == (1, {"CANCELLED": 1})


async def test_the_plot_is_a_picture(server: FakeInference, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench.png"
    assert await bench(server, "--requests", "10", "--output-len", "4", "--plot", str(file)) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("flag", "file"), [("--plot", "x.png"), ("--report", "x.html")])
def test_pictures_without_matplotlib_are_refused_before_the_load(
    flag: str, file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", flag, file]) == 2
    assert f"{flag} needs matplotlib: pip install 'penstock[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "0"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--input-len", "9:3"], "--input-len 9:3: 3 is below 9"),
        (["--output-len", "many"], "--output-len many: expected a number"),
        (["--output-len", "0"], "--output-len"),
        (["--prompts", "x", "--input-len", "3"], "--prompts is given"),
        (["--prompts", "x", "--dataset", "sharegpt"], "--prompts and --dataset sharegpt both provide prompts"),
        (["--dataset", "sharegpt"], "--dataset sharegpt needs --dataset-path"),
        (["--dataset-path", "x"], "--dataset-path is for --dataset sharegpt and json-schema, not for random"),
        (["--dataset", "json-schema", "--input-len", "3"], "--input-len is for --dataset random, not for json-schema"),
        (["--plot", "x.gif"], "must end in .png"),
        (["--json", "/nowhere/x.json"], "--json: cannot write"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *flags]) == 2
    assert message in capsys.readouterr().err


def test_without_a_server_the_message_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    assert main(["bench", "--address", f"127.0.0.1:{port}"]) == 1
    assert "penstock serve MODEL" in capsys.readouterr().err


async def test_a_model_that_is_not_served_is_named(server: FakeInference, capsys: pytest.CaptureFixture[str]) -> None:
    assert await bench(server, "--model", "other") == 2
    assert "--model other: " in capsys.readouterr().err
    assert await bench(server, "--lora", "fakes") == 2
    said = capsys.readouterr().err
    assert "--lora fakes: " in said
    assert "serves only fake; did you mean 'fake'?" in said


def test_lengths_that_the_model_cannot_take_are_refused() -> None:
    options = BenchOptions(address="x", input_len="400:500", output_len="13")
    with pytest.raises(ConfigError, match="up to 513 tokens together, but m accepts at most 512"):
        random_dataset(options, MODEL)


def test_random_prompts_share_the_prefix_that_is_asked_for() -> None:
    source = random_dataset(BenchOptions(address="x", input_len="3", shared_prefix_len=4), MODEL).prompts
    first, second = list(next(source).text), list(next(source).text)
    assert first[:4] == second[:4]
    assert first[4:] != second[4:]
    assert len(first) == 7


def test_ranges() -> None:
    assert parse_range("7", flag="-") == Range(7, 7)
    assert parse_range("7:9", flag="-") == Range(7, 9)


def test_percentiles_lie_between_two_values_in_proportion() -> None:
    assert [percentile([1.0, 2.0, 3.0, 5.0], p) for p in (0, 50, 75, 100)] == [1.0, 2.5, 3.5, 5.0]
    assert latencies([]) is None


def record(start: float, times: list[float], sizes: list[int], *, end: float, code: str = "OK") -> Record:
    return Record(start=start, end=end, code=code, prompt_tokens=10, times=array("d", times), sizes=array("l", sizes))


def test_latencies_of_a_request_follow_from_when_its_tokens_came() -> None:
    one = record(1.0, [1.5, 2.0, 3.0], [1, 1, 4], end=3.25)
    assert (one.ttft, one.latency, one.num_tokens) == (0.5, 2.25, 6)
    assert one.gaps() == [0.5, 0.25, 0.25, 0.25, 0.25]
    assert one.tpot == 0.3


def test_a_report_leaves_failed_requests_out_of_latencies() -> None:
    report = make_report(
        [
            record(0.0, [0.5, 1.0], [1, 1], end=1.0),
            record(0.5, [0.75], [1], end=4.0, code="UNAVAILABLE"),
        ],
        seconds=4.0,
        cpu_seconds=1.0,
    )
    assert report.failures == {"UNAVAILABLE": 1}
    assert (report.output_tokens_per_s, report.total_tokens_per_s, report.requests_per_s) == (0.75, 3.25, 0.25)
    assert report.peak_streams == 2
    assert report.cpu_share == 0.25
    assert report.e2e_ms is not None
    assert report.e2e_ms.max == 1000.0


def test_a_report_says_how_many_drafts_held_and_how_many_tokens_a_step_had() -> None:
    one, other = (record(0.0, [0.5, 1.0], [1, 5], end=1.0) for _ in range(2))
    one.accepted_draft_tokens, one.rejected_draft_tokens = 4, 2
    report = make_report([one, other], seconds=1.0, cpu_seconds=0.1)
    assert (report.accepted_draft_tokens, report.rejected_draft_tokens) == (4, 2)
    assert report.draft_acceptance == 4 / 6
    assert report.tokens_per_step == 12 / 8
    assert summary_rows(report)["drafts"] == "4 of 6 tokens accepted (67%), 1.50 tokens/step"
    results = as_json(BenchOptions(address="a:1"), report, [one])["results"]
    assert (results["draft_acceptance"], results["tokens_per_step"]) == (4 / 6, 1.5)


def test_a_report_without_drafts_does_not_speak_of_them() -> None:
    report = make_report([record(0.0, [0.5], [1], end=1.0)], seconds=1.0, cpu_seconds=0.1)
    assert (report.draft_acceptance, report.tokens_per_step) == (None, None)
    assert "drafts" not in summary_rows(report)


@pytest.mark.parametrize("load", [("--concurrency", "2"), ("--rate", "100")])
async def test_a_server_that_shuts_down_is_not_sent_any_more(
    server: FakeInference, load: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    server.shuts_down_after = 5
    assert await bench(server, "--requests", "100000", "--warmup", "0", "--output-len", "2", *load) == 1
    sent = len(server.requests)
    assert 5 < sent < 100_000
    assert f"the server is shutting down: sending stopped after {sent} requests" in capsys.readouterr().err


async def test_a_model_that_makes_no_text_is_refused(server: FakeInference, capsys: pytest.CaptureFixture[str]) -> None:
    server.capabilities = ["embed"]
    assert await bench(server) == 2
    assert (
        "does not generate text, which the benchmark measures; the model supports only embed" in capsys.readouterr().err
    )
