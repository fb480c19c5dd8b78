"""Reports of a run, divided into time slices."""

from array import array

from penstock_local.bench.report import JsonAnswers, Record, check_answers, cut


def test_tokens_are_counted_where_they_came_and_requests_where_they_ran() -> None:
    records = [
        Record(start=0.0, end=2.0, times=array("d", [0.5, 1.5]), sizes=array("l", [1, 3])),
        Record(start=1.0, end=4.0, times=array("d", [4.0]), sizes=array("l", [2])),
        Record(start=0.6, end=1.4),
    ]
    slices = cut(records, 4.0, 4)
    assert (slices.width, slices.middles) == (1.0, [0.5, 1.5, 2.5, 3.5])
    assert slices.tokens_per_s == [1.0, 3.0, 0.0, 2.0]
    assert slices.running == [1, 2, 1, 1]


# Check that answers match the requested JSON schema.

SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}'


def answered(text: str, *, code: str = "OK") -> Record:
    return Record(start=0.0, code=code, schema=SCHEMA, text=text)


def test_answers_are_counted_by_whether_they_parse_and_follow_their_schema() -> None:
    records = [answered(text) for text in ('{"n": 3}', '{"n": 30}', '{"n": 3', "{}")] + [answered("", code="ABORTED")]
    assert check_answers(records) == JsonAnswers(answers=4, parse=3, validate=1)
    good, large, cut, empty, failed = (record.problem for record in records)
    assert (good, failed) == ("", "")
    assert large == "$.n: 30 is greater than the maximum of 9"
    assert cut.startswith("not valid JSON: ")
    assert empty == "$: 'n' is a required property"


def test_without_schemas_nothing_is_counted() -> None:
    assert check_answers([Record(start=0.0, code="OK")]) is None
