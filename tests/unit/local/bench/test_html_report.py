"""The HTML page of a benchmark: its contents, and that it needs no other files."""

import re
from array import array
from datetime import UTC, datetime
from html.parser import HTMLParser

from penstock_local.bench.html_report import Run, html_report
from penstock_local.bench.options import BenchOptions
from penstock_local.bench.report import JsonAnswers, Record, make_report

VOID = {"meta", "link", "br"}


class Balance(HTMLParser):
    """Fails if elements are not closed in order. ``found`` are the elements, ``texts`` their visible texts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[str] = []
        self.texts: list[str] = []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def record(start: float, *times: float, code: str = "OK") -> Record:
    return Record(
        start=start,
        end=times[-1] if times else 4.0,
        code=code,
        times=array("d", times),
        sizes=array("l", [1] * len(times)),
    )


def page(records: list[Record], **options: object) -> tuple[str, Balance]:
    run = Run(
        options=BenchOptions(address="localhost:50051", sampling={"temperature": 0.5}, **options),
        model="<b>m",
        engines="2 engines",
        about="3 prompts of a&b.txt",
        began=datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
        version="0.1.0",
    )
    answers = JsonAnswers(answers=3, parse=2, validate=1)
    text = html_report(run, make_report(records, seconds=4.0, cpu_seconds=1.0, json_answers=answers), records)
    parsed = Balance()
    parsed.feed(text)
    assert parsed.open == []
    return text, parsed


def test_the_page_has_settings_tables_and_charts() -> None:
    records = [record(0.0, 0.5, 1.0, 1.5), record(0.1, 1.0, 3.0), record(0.2, code="UNAVAILABLE")]
    _, parsed = page(records, requests=3, end_at_eos=True, prompts="my prompts.txt")
    assert parsed.found.count("svg") == 4
    said = " ".join(parsed.texts)
    for words in (
        *("<b>m", "2026-01-02 03:04 UTC", "2 engines", "3 prompts of a&b.txt", "temperature 0.5"),
        *(
            "p50 700.0 ms",
            "Failed: 1 UNAVAILABLE",
            "2 of 3 answers parse, 1 follow their schema",
            "time to first token",
        ),
    ):
        assert words in said
    command = "penstock bench --address localhost:50051 --requests 3 --prompts 'my prompts.txt' --end-at-eos --temperature 0.5"
    assert command in said


def test_the_page_runs_nothing_and_loads_nothing() -> None:
    text, parsed = page([record(0.0, 0.5)])
    assert {"script", "link", "img", "iframe"}.isdisjoint(parsed.found)
    text = re.sub(r'http-equiv|xmlns(:xlink)?="[^"]*"|href="#\w+"|url\(#\w+\)', "", text)
    assert re.findall(r"(?:src|href)=|url\(|@import|http", text) == []


def test_the_charts_have_the_colors_of_the_page() -> None:
    text, _ = page([record(0.0, 0.5, 1.0), record(0.2, code="UNAVAILABLE")])
    charts = text[text.index("<svg") :]
    assert re.findall(r"#[0-9a-f]{6}\b", charts) == []
    assert {"var(--a)", "var(--b)", "var(--bad)", "var(--text)"} <= set(re.findall(r"var\(--\w+\)", charts))


def test_a_load_of_which_nothing_ended_well_has_a_page() -> None:
    _, parsed = page([record(0.0, code="CANCELLED")])
    assert "No request succeeded." in parsed.texts
    assert parsed.found.count("svg") == 4


def test_of_many_requests_some_are_drawn() -> None:
    _, parsed = page([record(index / 1000, 3.0) for index in range(1000)])
    assert "Requests, one of 3" in parsed.texts
