"""docs/guides/migrate-from-vllm.md describes the arguments of ``LLM`` correctly.

``tests.peers.arguments`` checks that the page names all arguments of vLLM's ``LLM``.
"""

import inspect
import re
from collections.abc import Iterator

import pytest

from penstock_local.llm import parameters as vllm_names
from penstock_local.llm.llm import LLM
from penstock_local.llm.options import OPTIONS
from tests.peers.arguments import section

HAS = {*OPTIONS, *inspect.signature(LLM.__init__).parameters} - {"self", "options"}
NAMES = re.compile(r"`([a-z0-9_*]+)`")
LED = re.compile(r"(?:the fields of this object as arguments: )?((?:`[a-z_]+`(?:, )?)+)")


def rows(header: str) -> Iterator[list[str]]:
    """Return the cells of each row of the table with this header."""
    table = section().partition(f"{header}\n")[2].partition("\n\n")[0]
    for line in table.splitlines()[1:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def test_arguments_of_the_same_name_are_there() -> None:
    names = set(NAMES.findall(section().partition("same name as in vLLM: ")[2].partition(". ")[0]))
    assert len(names) > 15
    assert names - HAS == set()


def test_other_names_are_there() -> None:
    for theirs, ours in rows("| vLLM argument | Penstock argument |"):
        led = LED.match(ours)
        assert led is not None, theirs
        assert set(NAMES.findall(led[1])) - HAS == set(), theirs


def test_errors_name_the_replacement_of_every_other_name() -> None:
    theirs = {name for names, _ in rows("| vLLM argument | Penstock argument |") for name in NAMES.findall(names)}
    assert theirs - vllm_names.OPTIONS.keys() - HAS == set()
    assert vllm_names.OPTIONS.keys() & HAS == set()


def test_what_is_not_here_is_not_here() -> None:
    names = {name for theirs, _ in rows("| Not supported | Reason |") for name in NAMES.findall(theirs)}
    assert len(names) > 100
    assert names & HAS == set()


@pytest.mark.parametrize(
    "row", [*rows("| Method | Same arguments | Other names | Not supported |")], ids=lambda row: row[0].replace("`", "")
)
def test_methods_have_the_arguments_that_are_named(row: list[str]) -> None:
    methods, same, other, missing = row
    renamed = [re.split(r" is | are ", part)[-1].partition(" (vLLM")[0] for part in other.split("; ")]
    for method in NAMES.findall(methods):
        parameters = inspect.signature(getattr(LLM, method)).parameters.keys()
        assert set(NAMES.findall(same)) - parameters == set()
        assert set(NAMES.findall(" ".join(renamed))) - parameters == set()
        assert set(NAMES.findall(missing)) & parameters == set()
