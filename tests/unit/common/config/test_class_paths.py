"""Classes that settings name."""

import importlib

import pytest

from penstock_common.config.class_paths import load_target
from penstock_common.errors import ConfigError

KNOWN = {"counter": "collections:Counter"}


def test_a_name_and_a_place_are_taken() -> None:
    assert load_target("a.b", "counter", KNOWN) is load_target("a.b", "collections:Counter", {})


@pytest.mark.parametrize(
    ("name", "known", "says"),
    [
        ("countr", KNOWN, "a.b is 'countr'; known: auto, counter; did you mean 'counter'"),
        ("other", {}, "a.b is 'other'; known: auto"),
        ("collections:Countr", KNOWN, "a.b is 'collections:Countr', which cannot be loaded: "),
        ("no_such_module:Counter", KNOWN, "a.b is 'no_such_module:Counter', which cannot be loaded: "),
        (":Counter", KNOWN, "a.b is ':Counter', which cannot be loaded: "),
    ],
)
def test_what_cannot_be_had_is_named(name: str, known: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_target("a.b", name, known, others=("auto",))


def test_where_nothing_is_known_it_says_so() -> None:
    with pytest.raises(ConfigError, match="a.b is 'x'; known: none"):
        load_target("a.b", "x", {})


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libbig.so: failed to map segment from shared object"),
        MemoryError(),
        ImportError("Cannot allocate memory"),
    ],
)
def test_where_memory_is_missing_it_says_so(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: str) -> None:
        raise error

    monkeypatch.setattr(importlib, "import_module", load)
    with pytest.raises(ConfigError, match=r"^not enough memory to load a\.b 'counter': .*container's memory limit"):
        load_target("a.b", "counter", KNOWN)
