"""What the fuzz sends: made from seed and number alone, and at every place."""

import json
from collections import Counter
from random import Random

from tests.fuzz import json_places, schemas
from tests.fuzz.attacks import Attacks
from tests.fuzz.findings import Findings
from tests.fuzz.http_calls import bounded
from tests.fuzz.rpc_calls import End
from tests.fuzz.variants import SETS, VARIANTS, share_of, variant_of

_NUMBERS = range(400)


def test_a_request_is_made_from_the_seed_and_its_number_alone() -> None:
    in_order = [Attacks(3).make(number) for number in _NUMBERS]
    backwards = [Attacks(3).make(number) for number in reversed(_NUMBERS[-40:])]

    assert [(each.attack, each.target, each.shown, each.size) for each in in_order[-40:]] == [
        (each.attack, each.target, each.shown, each.size) for each in reversed(backwards)
    ]


def test_every_attack_comes_up() -> None:
    attacks = Attacks(3)

    found = Counter(attacks.make(number).attack.split()[0] for number in range(600))

    assert set(found) == {
        "rpc",
        "http",
        "garbage",
        "json",
        "schemas",
        "grammars",
        "tensors",
        "mixed",
        "limits",
        "large",
    }


def test_a_request_belongs_to_one_variant() -> None:
    for turns in SETS.values():
        counted = Counter(variant_of(number, turns) for number in range(1000))

        assert counted == {name: round(1000 * share_of(name, turns)) for name in set(turns)}
    assert set(VARIANTS) == {name for turns in SETS.values() for name in turns}


def test_null_is_put_at_every_keyword_of_json_schema() -> None:
    nulled = set()
    for number in range(6000):
        text = schemas.schema(Random(number))
        nulled |= {keyword for keyword in schemas.KEYWORDS if f'"{keyword}": null' in text}

    assert nulled == set(schemas.KEYWORDS)


def test_every_place_of_a_value_is_one_to_put_something_at() -> None:
    value = {"a": [1, {"b": None}], "c": "d"}

    places = [*json_places.places(value)]

    assert places == [(), ("a",), ("a", 0), ("a", 1), ("a", 1, "b"), ("c",)]
    assert json_places.put(value, ("a", 1, "b"), {}) == {"a": [1, {"b": {}}], "c": "d"}
    assert value == {"a": [1, {"b": None}], "c": "d"}


def test_a_value_that_nests_too_deep_for_a_parser_is_written_out() -> None:
    text = json_places.text({"a": "deep:list:5000"})

    assert text == '{"a": ' + "[" * 5000 + "null" + "]" * 5000 + "}"


def test_a_body_asks_for_few_tokens() -> None:
    assert bounded({"max_tokens": 4096, "n": 4096}) == {"max_tokens": 32, "n": 4096}
    assert bounded({"max_tokens": 2**63}) == {"max_tokens": 2**63}
    assert bounded(json.loads('{"max_tokens": null}')) == {"max_tokens": None}


def test_findings_of_one_kind_are_one_with_the_smallest_request() -> None:
    findings = Findings()
    findings.variant = "plain"

    findings.ended("Generate", End("INTERNAL", "INTERNAL: engine 127.0.0.1:4711 is gone"), 7, "large", 900)
    findings.ended("Generate", End("INTERNAL", "INTERNAL: engine 127.0.0.1:4712 is gone"), 9, "small", 20)

    (found,) = findings.rows()
    assert (found.count, found.numbers, found.shown) == (2, [7, 9], "small")


def test_a_cause_that_is_known_replaces_the_suspects() -> None:
    findings = Findings()

    findings.happened("a session broke", "it did", [1, 2, 3], sure=False)
    findings.happened("a session broke", "it did", [2])

    (found,) = findings.rows()
    assert (found.numbers, found.sure) == ([2], True)
