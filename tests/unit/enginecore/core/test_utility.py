"""Calls by name: registered methods only, arguments checked against the signature."""

from typing import Any

import msgspec
import pytest

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.utility import UtilityRegistry, utility
from tests.fakes.engines.engine_harness import make_engine


class Owner:
    @utility
    def scale(self, values: list[int], factor: float = 2.0) -> list[float]:
        return [value * factor for value in values]

    @utility
    def echo(self, value: Any) -> Any:
        return value

    def secret(self) -> str:
        return "unreachable"


def call(name, *arguments):
    return UtilityRegistry(Owner()).call(name, msgspec.msgpack.encode(arguments))


def test_a_registered_method_is_called_with_converted_arguments():
    assert call("scale", [1, 2], 3) == [3.0, 6.0]
    assert call("scale", [1, 2]) == [2.0, 4.0]


@pytest.mark.parametrize("name", ["secret", "__init__", "__class__", "scale.__call__", ""])
def test_nothing_else_can_be_called(name):
    with pytest.raises(Unimplemented, match="no utility method"):
        call(name)


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(Unimplemented, match="did you mean 'scale'"):
        call("scael", [1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["a"],), "argument 'values' is wrong: Expected `int`, got `str`"),
        (([1], "2"), "argument 'factor' is wrong: Expected `float`, got `str`"),
        ((), "argument 'values' is missing"),
        (([1], 2, 3), "takes at most 2 arguments, got 3"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        call("scale", *arguments)


@pytest.mark.parametrize("raw", [b"\xc1", b"\x01", msgspec.msgpack.encode({"values": [1]})])
def test_arguments_that_are_no_array_are_refused(raw):
    with pytest.raises(InvalidArgument, match="not a msgpack array"):
        UtilityRegistry(Owner()).call("scale", raw)


def test_the_engine_tells_about_itself_and_resets_its_prefix_cache():
    engine = make_engine(num_blocks=20)
    utilities = EngineControl(engine).utilities
    info = utilities.call("engine_info", b"")
    assert info["num_kv_blocks"] == 20
    assert info["max_model_len"] == 76
    assert info["vocab_size"] == 1000
    assert {"engine_info", "reset_prefix_cache", "pause", "resume", "sleep"} < set(info["utilities"])
    assert utilities.call("reset_prefix_cache", b"") is True


def test_a_registered_function_gets_the_owner():
    registry = UtilityRegistry(Owner())

    def double(owner: Owner, value: int) -> list[float]:
        return owner.scale([value])

    registry.register("double", double)
    assert registry.invoke("double", [4]) == [8.0]
    with pytest.raises(ValueError, match="already registered"):
        registry.register("double", double)
    with pytest.raises(ValueError, match="parameter 'value' has no type"):
        registry.register("untyped", lambda owner, value: value)


@pytest.mark.parametrize("depth", [65, 200, 900, 970, 990, 1000, 5000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"])
def test_arguments_that_nest_too_deep_are_refused_with_the_limit(opening, depth):
    with pytest.raises(InvalidArgument, match="echo: arguments are nested more than 64 levels deep") as error:
        UtilityRegistry(Owner()).call("echo", b"\x91" + opening * depth + b"\xc0")
    assert error.value.field == "arguments"


@pytest.mark.parametrize("depth", [1, 50, 63])
def test_arguments_that_nest_as_deep_as_they_may_are_taken(depth):
    nested = msgspec.msgpack.decode(b"\x91" * depth + b"\xc0")
    assert call("echo", nested) == nested
