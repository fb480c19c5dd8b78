"""What the comparison of speculation with vLLM reckons with."""

import msgspec
import pytest

from tests.benchmarks.speculation_peer import FAULT, bodies, places, repaired
from tests.benchmarks.speculation_runs import Place, Run, cell, changed_share, counting, draft_counts, lacks, report

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 118.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 2.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 590.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 3.75e+02
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 100.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
"""
PLACE = Place(workload="stories", streams=1, temperature=0.0, part=0)


def a_run(server: str = "vLLM", method: str = "off", texts: str = "ab", **fields: object) -> Run:
    """Twelve tokens in two seconds."""
    made = Run(
        server=server,
        method=method,
        dtype="float32",
        place=PLACE,
        tokens=12,
        seconds=2.0,
        drafts=0.0,
        accepted=0.0,
        others=0.0,
        settings="",
        texts=list(texts),
    )
    return msgspec.structs.replace(made, **fields)


def test_counts_of_drafts_are_of_all_engines():
    assert draft_counts(METRICS) == (120.0, 375.0)
    assert draft_counts("vllm:num_requests_running 1.0\n") == (0.0, 0.0)


@pytest.mark.parametrize(("before", "after", "share"), [("", "", 0.0), ("abcd", "abcd", 0.0), ("abcd", "abdc", 0.5)])
def test_requests_changed_are_those_whose_texts_differ(before: str, after: str, share: float):
    assert changed_share(before, after) == share


def test_texts_of_other_requests_are_not_compared():
    with pytest.raises(ValueError, match="2 texts beside 1"):
        changed_share("ab", "a")


def test_the_least_disturbed_run_of_each_part_counts():
    second = msgspec.structs.replace(PLACE, part=1)
    loud, calm, other = a_run(others=0.3), a_run(others=0.02), a_run(others=0.6, place=second)
    assert counting([loud, other, calm]) == {0: calm, 1: other}


@pytest.mark.parametrize(
    ("others", "times", "lacking"), [([], 1, True), ([0.3], 1, True), ([0.3, 0.01], 1, False), ([0.01], 2, True)]
)
def test_a_place_lacks_runs_until_one_was_undisturbed(others: list[float], times: int, lacking: bool):
    assert lacks([a_run(others=share) for share in others], PLACE, times) == lacking


def test_a_cell_has_rates_lengths_and_changes():
    before = [a_run(texts="ab"), a_run(texts="ac", others=0.01)]
    found = cell([a_run(method="ngram", texts="xb", seconds=1.0, drafts=4.0, accepted=6.0)], before)
    assert (found["off"], found["on"]) == (6.0, 12.0)
    assert (found["length"], found["per step"]) == (2.5, 2.0)
    assert (found["changed"], found["again"]) == (0.5, 0.5)


def test_the_table_has_what_both_servers_did():
    theirs = [a_run(), a_run(method="ngram"), a_run(method="suffix")]
    ours = [a_run("Penstock"), a_run("Penstock", method="ngram", seconds=1.0)]
    rows = report([*theirs, *ours]).splitlines()[2:]
    assert [row.split("|")[1:10] for row in rows] == [
        [" ngram, float32 ", " 1 ", " 0 ", " 6 ", " 6 ", " 6 ", " 12 ", " 2.00 ", " 1.00 "]
    ]


@pytest.mark.parametrize("method", ["off", "draft_model", "ngram"])
def test_every_request_is_asked_at_each_place(method: str):
    for workload in {place.workload for place in places(method)}:
        asked = [place for place in places(method) if place.workload == workload]
        assert {(place.streams, place.temperature) for place in asked} == {(1, 0.0), (1, 0.8), (8, 0.0), (8, 0.8)}
        seeds = [body["seed"] for body in bodies(workload, 0.8)]
        assert seeds == list(range(64))


def test_the_repair_is_made_once():
    source = f"def _expand_kernel_impl(output, input_val, cu_num_tokens, replace_from, replace_to):\n{FAULT}"
    assert FAULT not in repaired(source)
    assert repaired(repaired(source)) == repaired(source)
    compile(repaired(source), "cpu_triton_utils.py", "exec")
