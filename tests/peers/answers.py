"""Comparison of two servers' answers to the same requests: fields that only one answer has, and fields with different
types.

Serve one model under the name ``m`` with both servers, and run:

    vllm serve examples/demo_model/penstock-tiny --served-model-name m --port 8100 --max-model-len 2048 penstock serve
    examples/demo_model/penstock-tiny --served-model-name m --http-port 8000 python -m tests.peers.answers --there
    http://127.0.0.1:8100 --here http://127.0.0.1:8000

With ``--does`` embed, classify or score, requests are for models with this task. ``python -m tests.peers.checkpoints``
writes such models.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from tests.peers.cases import Case, Does, cases
from tests.peers.shapes import Difference, Event, differences, events_of, kinds, kinds_of_events, sequence

TIMEOUT = 120.0
_STATUS = "(status)"
_LONGEST = 200
"""Maximum number of printed characters of a message."""
_MOST_NAMES = 3
console = Console(width=200)


class Answer(msgspec.Struct, frozen=True):
    """Answer of one server. ``body`` is JSON, or text if it is not valid JSON. ``events`` are those of a stream."""

    status: int
    content_type: str
    body: Any
    events: list[Event]

    @property
    def fields(self) -> Mapping[str, set[str]]:
        """Fields of the answer with their kinds, including the status and the order of events."""
        found = kinds_of_events(self.events) if self.events else kinds(self.body)
        named = {_STATUS: {str(self.status)}, "(content type)": {self.content_type}}
        if self.events:
            named["(events)"] = {", ".join(sequence(self.events))}
        return found | named

    @property
    def message(self) -> str:
        """Error message of a refusal; empty if the request succeeded."""
        error = self.body.get("error", self.body) if isinstance(self.body, dict) else self.body
        return str(error.get("message", error) if isinstance(error, dict) else error) if self.status >= 400 else ""


class Compared(msgspec.Struct, frozen=True):
    """A request and the differences between its two answers."""

    path: str
    name: str
    statuses: tuple[int, int]
    differences: list[Difference]
    messages: tuple[str, str]


def ask(client: httpx.Client, case: Case) -> Answer:
    """Send a request and return its answer."""
    if case.body is None:
        response = client.get(case.path)
    else:
        body = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
        response = client.post(case.path, content=body, headers={"content-type": "application/json"})
    content_type = response.headers.get("content-type", "").partition(";")[0]
    streamed = content_type == "text/event-stream"
    events = [Event(each.name, _json(each.data)) for each in events_of(response.text.splitlines())] if streamed else []
    return Answer(response.status_code, content_type, None if streamed else _json(response.text), events)


def compare(case: Case, there: Answer, here: Answer) -> Compared:
    """Compare two answers. If only one server refuses the request, the result is that difference alone."""
    fields = [there.fields, here.fields]
    if (there.status < 400) != (here.status < 400):
        fields = [{_STATUS: each[_STATUS]} for each in fields]
    return Compared(
        path=case.path,
        name=case.name,
        statuses=(there.status, here.status),
        differences=differences(*fields),
        messages=(there.message, here.message),
    )


def documents(there: Any, here: Any) -> list[Difference]:
    """Compare two OpenAPI documents: their routes, and the body fields of the routes that both have."""
    found = differences({path: {"route"} for path in there["paths"]}, {path: {"route"} for path in here["paths"]})
    for path in sorted(there["paths"].keys() & here["paths"].keys()):
        fields = [{f"{path} {name}": {"field"} for name in _body_fields(each, path)} for each in (there, here)]
        found += differences(*fields)
    return found


def _body_fields(document: Any, path: str) -> set[str]:
    body = document["paths"][path].get("post", {}).get("requestBody", {})
    return _properties(document, body.get("content", {}).get("application/json", {}).get("schema", {}))


def _properties(document: Any, schema: Any) -> set[str]:
    """Return the property names of a schema and of its alternatives."""
    if "$ref" in schema:
        return _properties(document, document["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    below = [each for word in ("anyOf", "oneOf", "allOf") for each in schema.get(word, [])]
    return set(schema.get("properties", {})).union(*(_properties(document, each) for each in below))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def table(found: list[Compared]) -> Table:
    """Return a table with a line for every difference of a route, and the requests whose answers have the difference."""
    of_routes: dict[str, dict[Difference, list[str]]] = {}
    for each in found:
        rows = of_routes.setdefault(each.path, {})
        for row in each.differences:
            rows.setdefault(row, []).append(each.name)
    made = Table("field", "there", "here", "requests", title=summary(found))
    for path, rows in of_routes.items():
        made.add_section()
        made.add_row(f"[bold]{path}")
        for row, names in sorted(rows.items()):
            made.add_row(*row, _shown(names))
    return made


def messages(found: list[Compared]) -> Table:
    """Return the error messages and statuses of both servers."""
    made = Table("request", "there", "here", title="errors")
    for each in found:
        if any(each.messages):
            sides = zip(each.statuses, each.messages, strict=True)
            made.add_row(f"{each.path}: {each.name}", *(f"{status} {message[:_LONGEST]}" for status, message in sides))
    return made


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else "")


def summary(found: list[Compared]) -> str:
    """Return the number of compared answers and of differences, as text."""
    routes = len({each.path for each in found})
    other = sum(each.statuses[0] != each.statuses[1] for each in found)
    rows = len({(each.path, *row) for each in found for row in each.differences})
    return f"{len(found)} requests to {routes} routes: {rows} differences; {other} answers differ in the status"


def main() -> int:
    """Send the requests to both servers, and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--there", required=True, help="base URL of the other server, http://host:port")
    parser.add_argument("--here", required=True, help="base URL of the Penstock server")
    parser.add_argument("--does", choices=get_args(Does), default="generate", help="task of the model")
    parser.add_argument("--only", default="", help="only requests whose path and name contain this text")
    parser.add_argument("--routes", action="store_true", help="compare /openapi.json, too")
    parser.add_argument("--json", type=Path, help="also write all answers to this file")
    args = parser.parse_args()
    answers: dict[str, tuple[Answer, Answer]] = {}
    found = []
    with (
        httpx.Client(base_url=args.there, timeout=TIMEOUT) as there,
        httpx.Client(base_url=args.here, timeout=TIMEOUT) as here,
    ):
        for case in cases(args.does):
            if args.only in (name := f"{case.path}: {case.name}"):
                answers[name] = ask(there, case), ask(here, case)
                found.append(compare(case, *answers[name]))
        if args.routes:
            rows = documents(there.get("/openapi.json").json(), here.get("/openapi.json").json())
            for row in rows:
                console.print(f"{row.field}: {'only there' if row.here == '-' else 'only here'}", highlight=False)
    console.print(table(found), messages(found))
    if args.json:
        args.json.write_bytes(msgspec.json.encode(answers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
