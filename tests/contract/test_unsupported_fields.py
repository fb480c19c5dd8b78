"""The list of refused fields equals the table in docs/reference/request-fields.md, and fits the structs of request
bodies.
"""

import re

import msgspec

from penstock_frontend.api.ignored_fields import ignored_in
from penstock_frontend.api.unsupported_fields import ROUTES, UNSUPPORTED, unsupported_in
from tests.contract.test_ignored_fields import SOURCES, body_structs
from tests.documents.field_tables import REFERENCE, updated


def test_the_page_is_up_to_date() -> None:
    assert (REFERENCE / "request-fields.md").read_text(encoding="utf-8") == updated("request-fields.md"), (
        "run make settings"
    )


def test_each_field_of_a_struct_has_one_remedy() -> None:
    for struct in ROUTES:
        names = [name for field in UNSUPPORTED if struct in field.structs for name in field.names]
        assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]


def test_no_field_is_refused_and_ignored() -> None:
    for struct in ROUTES:
        assert not unsupported_in(struct).keys() & ignored_in(struct)


def test_a_refused_field_of_a_struct_is_refused_where_the_struct_is_checked() -> None:
    """Checks structs that define a refused field. For such structs, the route must refuse the field explicitly."""
    sources = "".join(path.read_text() for path in (SOURCES / "api").rglob("*.py"))
    asked = {
        name
        for call in re.findall(r"refuse_fields\(\s*body,([^)]*)\)", sources)
        for name in re.findall(r'"(\w+)"', call)
    }
    for struct in ROUTES:
        declared = {field.encode_name for field in msgspec.structs.fields(body_structs()[struct])}
        assert declared & unsupported_in(struct).keys() <= asked


def test_the_remedy_of_a_field_is_a_field_of_the_same_body() -> None:
    for struct in ROUTES:
        served = {field.encode_name for field in msgspec.structs.fields(body_structs()[struct])}
        for name, field in unsupported_in(struct).items():
            if re.fullmatch(r"[a-z_]+(\.\w+)?", field.instead) and struct != "MessageBody":
                first = field.instead.partition(".")[0]
                assert first in served - unsupported_in(struct).keys(), (struct, name, field.instead)
