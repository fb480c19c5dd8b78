"""schemathesis, driven by ``/openapi.json``."""

import asyncio
from typing import Any

import hypothesis
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis.config import SchemathesisConfig
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.generation.modes import GenerationMode
from schemathesis.specs.openapi import checks

from tests.fuzz.findings import Findings
from tests.fuzz.rpc_calls import End

_CHECKS = (
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
)
_SHORT = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}
"""Fields that limit the number of an answer's tokens, by route."""


async def schema_storm(port: int, findings: Findings, *, examples: int, seed: int) -> list[str]:
    """Send valid and invalid requests according to the document, ``examples`` per operation. Return the problems."""
    return await asyncio.to_thread(_storm, f"http://127.0.0.1:{port}", findings, examples, seed)


def _storm(url: str, findings: Findings, examples: int, seed: int) -> list[str]:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", config=SchemathesisConfig())
    wrong: list[str] = []
    for found in schema.get_all_operations():
        operation: Any = found.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            wrong += _check(operation, mode, findings, url=url, examples=examples // 2, seed=seed)
    return wrong


def _check(
    operation: Any, mode: GenerationMode, findings: Findings, *, url: str, examples: int, seed: int
) -> list[str]:
    wrong: list[str] = []
    target = f"schemathesis {operation.method} {operation.path}"

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body = {**case.body, **{name: 2 for name in limits if case.body.get(name) is None}}
        response = case.call(base_url=url, timeout=20)
        problem = ""
        try:
            case.validate_response(response, checks=_CHECKS)
        except (Failure, FailureGroup) as e:
            problem = "; ".join(str(each) for each in getattr(e, "exceptions", [e]))
        findings.ended(target, End(str(response.status_code), problem), None, case.as_curl_command()[:1500], 0)

    limits = _SHORT.get(operation.path, ())
    try:
        check()
    except hypothesis.errors.Unsatisfiable:
        pass  # a GET without parameters has no invalid requests
    except Exception as e:
        wrong.append(f"{target}: {type(e).__name__}: {e}")
    return wrong
