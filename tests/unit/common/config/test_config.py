"""Typed configuration: sources, precedence, and errors that name the key."""

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from penstock_common.config.checks import check_fields, check_range
from penstock_common.config.loader import dump, from_command_line, load
from penstock_common.config.sections import ServerConfig
from penstock_common.config.settings import PATTERN, ByteSize, format_bytes, parse_bytes, settings_of
from penstock_common.errors import ConfigError


class Inner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    size: ByteSize | None = None
    mode: Literal["fast", "slow"] = "fast"
    count: Annotated[int, Meta(ge=1, le=10, description="Things.")] = 3
    share: Annotated[float, Meta(gt=0, le=1, description="A fraction.")] | None = None
    weights: dict[str, Annotated[float, Meta(ge=0.5)]] = {}

    def __post_init__(self) -> None:
        check_fields("inner", self)


class Outer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    inner: Inner = Inner()
    flag: bool = False
    words: tuple[str, ...] = ()
    server: ServerConfig = ServerConfig(port=50051)


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
    ).load()
    assert config == Outer(name="n", inner=Inner(size=2_000_000), flag=True)
    assert {setting.key for setting in settings_of(Outer)} >= {"name", "inner.size", "server.max_message_bytes"}


def test_a_section_given_in_part_keeps_the_rest_of_its_own_defaults(tmp_path: Path) -> None:
    config = load(Outer, file=write(tmp_path, "name: n\nserver: {max_concurrent_streams: 7}"), environ={})
    assert (config.server.port, config.server.max_concurrent_streams) == (50051, 7)


def test_a_value_out_of_range_is_refused_also_where_the_struct_is_built_by_call() -> None:
    with pytest.raises(ConfigError, match=r"inner\.count is 11; it must be from 1 to 10"):
        Inner(count=11)
    with pytest.raises(ConfigError, match="inner.mode is 'fats'; known: fast, slow; did you mean 'fast'"):
        Inner(mode="fats")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"inner\.weights\.gold is nan"):
        Inner(weights={"gold": float("nan")})


def test_help_tells_each_setting_with_its_range_its_default_and_its_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        from_command_line(Outer, prog="x", description="", argv=["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--inner.count INT Things. (from 1 to 10; default: 3; PENSTOCK_INNER__COUNT)" in text
    assert "--inner.share FLOAT A fraction. (above 0 and at most 1; default: unset; PENSTOCK_INNER__SHARE)" in text
    assert "default: 50051; PENSTOCK_SERVER__PORT)" in text
    assert "server.tls: TLS for a listener. TLS is off if certificate is empty." in text


def test_lists_can_be_given_as_text() -> None:
    assert load(Outer, overrides={"name": "n", "words": "[a, b]"}, environ={}).words == ("a", "b")


def test_a_dumped_config_loads_to_an_equal_config(tmp_path: Path) -> None:
    config = Outer(name="n", inner=Inner(size=77), words=("a",))
    assert load(Outer, file=write(tmp_path, dump(config)), environ={}) == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5", 5), ("1k", 1024), ("1KiB", 1024), ("1kB", 1000), ("2GiB", 2 * 1024**3), ("1.5 MiB", 1_572_864), ("7B", 7)],
)
def test_sizes_are_read_with_their_units(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected
    assert re.fullmatch(PATTERN, text)


@pytest.mark.parametrize("text", ["", "-1", "1 parsec", "1Ki", "1i"])
def test_what_is_no_size_is_refused_by_the_charts_pattern_as_well(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)
    assert not re.fullmatch(PATTERN, text)


@pytest.mark.parametrize("size", [0, 1, 1000, 1024, 1536, 5 * 1024**2, 4 * 1024**3, 2**31 - 1])
def test_sizes_are_written_as_they_are_read(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == size


@pytest.mark.parametrize(
    ("yaml_text", "message"),
    [
        ("{}", "name is required"),
        ("nam: x", "there is no setting 'nam'; did you mean 'name'?"),
        ("name: x\ninner: {sise: 1}", "there is no setting 'inner.sise'; did you mean 'size'?"),
        ("name: x\ninner: 3", "'inner' must be a mapping, not 3"),
        ("name: x\ninner: {count: eleven}", "inner.count is 'eleven'; it must be an integer"),
        ("name: x\ninner: {count: 11}", "inner.count is 11; it must be from 1 to 10"),
        ("name: x\ninner: {mode: quick}", "inner.mode is 'quick'; known: fast, slow"),
        ("name: x\ninner: {share: 0}", "inner.share is 0; it must be above 0 and at most 1"),
        ("name: x\ninner: {weights: {gold: 0.1}}", "inner.weights.gold is 0.1; it must be at least 0.5"),
        ("name: x\nserver: {host: ''}", "server.host is required"),
        (
            "name: x\nserver: {max_message_bytes: 1KiB}",
            "server.max_message_bytes is 1024; it must be from 64KiB to 2147483647",
        ),
        ("name: x\ninner: {size: 3 parsecs}", "inner.size: '3 parsecs' is not a size"),
        ("name: x\nserver: {port: 70000}", "server.port is 70000; it must be from 0 to 65535"),
        ("- a", "must contain a mapping, not a list"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_key(tmp_path: Path, yaml_text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(Outer, file=write(tmp_path, yaml_text), environ={})
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml cannot be read: No such file"):
        load(Outer, file=tmp_path / "absent.yaml", environ={})


def test_a_misspelt_environment_variable_is_refused_and_others_are_left_alone() -> None:
    with pytest.raises(
        ConfigError, match="PENSTOCK_INNER__COUNTS: there is no setting 'inner.counts'; did you mean 'inner.count'"
    ):
        load(Outer, overrides={"name": "n"}, environ={"PENSTOCK_INNER__COUNTS": "1"})
    load(Outer, overrides={"name": "n"}, environ={"PENSTOCK_COORDINATOR_SERVICE_HOST": "10.0.0.1"})


def test_nan_is_outside_every_range() -> None:
    with pytest.raises(ConfigError, match="x is nan"):
        check_range("x", float("nan"), low=0.0)


def test_a_date_that_does_not_exist_is_refused_as_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load(Outer, file=write(tmp_path, "name: 2026-02-31"), environ={})
