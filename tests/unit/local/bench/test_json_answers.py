"""Whether answers are the JSON that was asked for."""

from penstock_local.bench.report import JsonAnswers, Record, check_answers

SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}'


def answered(text: str, *, code: str = "OK") -> Record:
    return Record(start=0.0, code=code, schema=SCHEMA, text=text)


def test_answers_are_counted_by_whether_they_parse_and_follow_their_schema() -> None:
    records = [answered(text) for text in ('{"n": 3}', '{"n": 30}', '{"n": 3', "{}")] + [answered("", code="ABORTED")]
    assert check_answers(records) == JsonAnswers(answers=4, parse=3, validate=1)
    good, large, cut, empty, failed = (record.problem for record in records)
    assert (good, failed) == ("", "")
    assert large == "$.n: 30 is greater than the maximum of 9"
    assert cut.startswith("it is no JSON: ")
    assert empty == "$: 'n' is a required property"


def test_without_schemas_nothing_is_counted() -> None:
    assert check_answers([Record(start=0.0, code="OK")]) is None
