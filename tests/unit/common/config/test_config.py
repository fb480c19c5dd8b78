"""Typed configuration: sources, precedence, and errors that name the key."""

from pathlib import Path
from typing import Literal

import msgspec
import pytest

from penstock_common.config.checks import ByteSize, check_range, parse_bytes
from penstock_common.config.loader import dump, fields, from_command_line, load
from penstock_common.config.sections import ServerConfig
from penstock_common.errors import ConfigError


class Inner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    size: ByteSize | None = None
    mode: Literal["fast", "slow"] = "fast"
    count: int = 3

    def __post_init__(self) -> None:
        check_range("inner.count", self.count, low=1, high=10)


class Outer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    inner: Inner = Inner()
    flag: bool = False
    words: tuple[str, ...] = ()
    server: ServerConfig = ServerConfig()


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_flags_win_over_the_environment_and_the_environment_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "name: file\ninner: {count: 4, size: 1KiB, mode: slow}\n")
    environ = {"PENSTOCK_INNER__COUNT": "5", "PENSTOCK_INNER__MODE": "fast"}
    config = load(Outer, file=file, environ=environ, overrides={"inner.count": "6"})
    assert config == Outer(name="file", inner=Inner(size=1024, mode="fast", count=6))


def test_flag_names_derive_from_the_struct() -> None:
    config = from_command_line(
        Outer, prog="x", description="", argv=["--name", "n", "--inner.size", "2MB", "--flag", "true"]
    )
    assert config == Outer(name="n", inner=Inner(size=2_000_000), flag=True)
    assert dict(fields(Outer)).keys() >= {"name", "inner.size", "server.max_message_bytes"}


def test_lists_can_be_given_as_text() -> None:
    assert load(Outer, overrides={"name": "n", "words": "[a, b]"}, environ={}).words == ("a", "b")


def test_what_is_dumped_loads_to_an_equal_config(tmp_path: Path) -> None:
    config = Outer(name="n", inner=Inner(size=77), words=("a",))
    assert load(Outer, file=write(tmp_path, dump(config)), environ={}) == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5", 5), ("1k", 1024), ("1KiB", 1024), ("1kB", 1000), ("2GiB", 2 * 1024**3), ("1.5 MiB", 1_572_864), ("7B", 7)],
)
def test_sizes_are_read_with_their_units(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("yaml_text", "message"),
    [
        ("{}", "name is required"),
        ("nam: x", "unknown key 'nam'; did you mean 'name'?"),
        ("name: x\ninner: {sise: 1}", "unknown key 'inner.sise'; did you mean 'size'?"),
        ("name: x\ninner: 3", "'inner' must be a mapping, not 3"),
        ("name: x\ninner: {count: eleven}", "inner.count is 'eleven': expected `int`, got `str`"),
        ("name: x\ninner: {count: 11}", "inner.count is 11; it must be from 1 to 10"),
        ("name: x\ninner: {mode: quick}", "inner.mode is 'quick'"),
        ("name: x\ninner: {size: 3 parsecs}", "inner.size: '3 parsecs' is not a size"),
        ("name: x\nserver: {port: 70000}", "server.port is 70000; it must be from 0 to 65535"),
        ("- a", "must hold a mapping, not a list"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_key(tmp_path: Path, yaml_text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(Outer, file=write(tmp_path, yaml_text), environ={})
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        load(Outer, file=tmp_path / "absent.yaml", environ={})


def test_a_misspelt_environment_variable_is_refused_and_others_are_left_alone() -> None:
    with pytest.raises(
        ConfigError, match="PENSTOCK_INNER__COUNTS: no such key 'inner.counts'; did you mean 'inner.count'"
    ):
        load(Outer, overrides={"name": "n"}, environ={"PENSTOCK_INNER__COUNTS": "1"})
    load(Outer, overrides={"name": "n"}, environ={"PENSTOCK_COORDINATOR_SERVICE_HOST": "10.0.0.1"})


def test_nan_is_outside_every_range() -> None:
    with pytest.raises(ConfigError, match="x is nan"):
        check_range("x", float("nan"), low=0.0)
