"""Every format, compared with plain Python: admitted strings are valid, and Python's own output is admitted."""

import datetime as dt
import ipaddress
import random
import re
import uuid
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from penstock_enginecore.structured_output.constraints.strings import FORMATS


def matches(name: str, text: str) -> bool:
    return re.fullmatch(FORMATS[name].removeprefix("^").removesuffix("$"), text, re.ASCII) is not None


def in_leap_day(day: dt.date) -> bool:
    return (day.month, day.day) == (2, 29)


def test_every_day_of_every_tenth_of_a_century_and_the_ends_is_a_date():
    for year in (1, 9, 10, 90, 100, 900, 1000, 1900, 1970, 2000, 2010, 2026, 2030, 9990, 9999):
        day = dt.date(year, 1, 1)
        while day.year == year:
            assert matches("date", day.isoformat()) is not in_leap_day(day)
            if day == dt.date.max:
                break
            day += dt.timedelta(days=1)


def test_every_year_is_a_year_but_the_zeroth():
    assert [year for year in range(10_000) if not matches("date", f"{year:04}-06-15")] == [0]


@pytest.mark.parametrize("seed", range(200))
def test_output_of_python_is_admitted(seed: int):
    rng = random.Random(seed)
    moment = dt.datetime(
        rng.randint(1, 9999), rng.randint(1, 12), rng.randint(1, 28), rng.randint(0, 23), rng.randint(0, 59)
    )
    moment = moment.replace(second=rng.randint(0, 59), microsecond=rng.choice([0, rng.randint(1, 999_999)]))
    moment = moment.replace(tzinfo=dt.timezone(dt.timedelta(minutes=rng.randint(-23 * 60, 23 * 60))))
    assert matches("date-time", moment.isoformat())
    assert matches("time", moment.timetz().isoformat())
    assert matches("date-time", moment.isoformat().replace("T", "x")) is False
    assert matches("ipv4", str(ipaddress.IPv4Address(rng.getrandbits(32))))
    assert matches("ipv6", ipaddress.IPv6Address(rng.getrandbits(128)).exploded)
    assert matches("uuid", str(uuid.UUID(int=rng.getrandbits(128))))


READERS: dict[str, Callable[[str], object]] = {
    "date": dt.date.fromisoformat,
    "time": dt.time.fromisoformat,
    "date-time": dt.datetime.fromisoformat,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    "uri": lambda text: urlsplit(text).port,
}
VALID = {
    "date": "2030-12-31",
    "time": "23:59:59.123456+01:00",
    "date-time": "2030-01-31T00:00:00Z",
    "duration": "P1Y2M3DT4H5M6S",
    "email": "some.one+tag@mail.example.org",
    "hostname": "a-b.example.org",
    "ipv4": "255.250.199.0",
    "ipv6": "2001:0db8:0000:0000:0000:ff00:0042:8329",
    "uuid": "01234567-89ab-cdef-0123-456789abcdef",
    "uri": "https://example.org:8080/a/b?c=d#e",
}


def test_every_format_has_an_example_that_is_allowed():
    assert VALID.keys() == FORMATS.keys()
    assert all(matches(name, text) for name, text in VALID.items())


@pytest.mark.parametrize("name", READERS)
def test_what_is_allowed_near_an_example_its_reader_reads(name: str):
    rng, found = random.Random(name), 0
    for _ in range(4000):
        text = list(VALID[name])
        for _ in range(rng.randint(1, 3)):
            text[rng.randrange(len(text))] = rng.choice("0123456789abcdef:.-TZ+/?#")
        if matches(name, "".join(text)):
            READERS[name]("".join(text))
            found += 1
    assert found > 20


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("date", "0000-01-01"),
        ("date", "2023-02-30"),
        ("date", "2023-13-01"),
        ("date", "2023-04-31"),
        ("date", "02023-04-30"),
        ("time", "24:00:00Z"),
        ("time", "12:00:00"),
        ("date-time", "2023-01-01 12:00:00Z"),
        ("duration", "P"),
        ("duration", "PT"),
        ("duration", "P1DT"),
        ("duration", "P1W1D"),
        ("email", "@example.org"),
        ("email", "a..b@example.org"),
        ("hostname", "-a.example"),
        ("hostname", "a-"),
        ("ipv4", "256.0.0.1"),
        ("ipv4", "01.2.3.4"),
        ("ipv6", "1:2:3:4:5:6:7"),
        ("uuid", "0123456789abcdef0123456789abcdef"),
        ("uri", "example.org"),
    ],
)
def test_invalid_strings_are_not_admitted(name: str, text: str):
    assert not matches(name, text)
