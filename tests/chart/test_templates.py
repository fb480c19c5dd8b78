"""Check that each template has its own test file, so that tests of a template are easy to find."""

from pathlib import Path

import pytest

from charts import lint

TEMPLATES = lint.CHART / "templates"
TESTS = Path(__file__).parent
RENDERED_BY = {
    "_config.tpl": "configmap.yaml",
    "_kubernetes.tpl": "rbac.yaml",
    "network/_rules.tpl": "networkpolicies.yaml",
    "enginecore/_container.tpl": "_pod.tpl",
}
"""Partial templates that are tested with the manifest they are for."""


@pytest.mark.parametrize(
    "template", sorted(path.relative_to(TEMPLATES) for path in TEMPLATES.rglob("*") if path.is_file()), ids=str
)
def test_every_template_has_its_tests(template: Path):
    tested = RENDERED_BY.get(str(template), RENDERED_BY.get(template.name, template.name))
    name = tested.partition(".")[0].removeprefix("_").lower()
    expected = TESTS / template.parent / f"test_{name}.py"
    assert expected.exists(), (
        f"write {expected.relative_to(TESTS.parents[1])}: what is there with the value, what is not without"
    )
