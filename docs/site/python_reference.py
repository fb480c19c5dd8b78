"""Writes the pages of the Python reference: the client ``penstock_client``, and ``LLM`` of ``penstock_local``."""

import inspect
from collections.abc import Iterator

import penstock_client
import penstock_local
from docs.site.pages import API_FOLDER
from penstock_client import requests
from penstock_common.config.settings import Setting, sections_of
from penstock_enginecore.config import EngineCoreConfig
from penstock_local.llm.options import OPTIONS

_OTHERS = "Exception, BaseException, Struct, Enum, IntEnum, StrEnum, ReprEnum, int, str, dict, tuple"
"""Base classes of other projects, whose methods are left out."""


def python_pages() -> dict[str, str]:
    """Return the pages in reStructuredText by their names."""
    return {
        f"{API_FOLDER}/python_client.rst": "\n".join(_client()) + "\n",
        f"{API_FOLDER}/llm.rst": "\n".join(_llm()) + "\n",
    }


def _client() -> Iterator[str]:
    yield from _title("Python client: penstock_client", "=")
    yield from (
        "The wheel ``penstock-client`` of a release has the client.",
        ":doc:`/guides/clients/python` shows how to use it.",
        "",
    )
    public = {name: getattr(penstock_client, name) for name in penstock_client.__all__}
    own = {name: value for name, value in public.items() if value.__module__.startswith("penstock_client")}
    errors = [name for name, value in own.items() if inspect.isclass(value) and issubclass(value, Exception)]
    first = ["Client", "AsyncClient", "Stream", "AsyncStream", "Tls", "Keepalive"]
    functions = [name for name, value in own.items() if inspect.isfunction(value)]
    results = [name for name in own if name not in {*first, *errors, *functions}]
    yield from _title("Clients and streams", "-")
    yield from _objects("penstock_client", first)
    yield from _title("Options of calls", "-")
    yield from _objects(requests.__name__, ["CallOptions", "GenerateOptions", "ChatOptions"])
    yield from _title("Results", "-")
    yield from _objects("penstock_client", results)
    yield from _title("Media and messages", "-")
    yield from _objects("penstock_client", functions, "autofunction")
    yield from _title("Errors", "-")
    yield from _objects("penstock_client", sorted(errors, key=lambda name: name != "PenstockError"), "autoexception")
    yield from _title("Messages of the contract", "-")
    yield from ("These names are generated messages. Their fields are described in the reference of the contracts.", "")
    for name in sorted(public.keys() - own.keys()):
        full = public[name].DESCRIPTOR.full_name
        yield f"- :ref:`{name} <proto-{full.replace('.', '-').lower()}>`"


def _llm() -> Iterator[str]:
    yield from _title("LLM: penstock_local", "=")
    yield from ("The wheel ``penstock`` of a release has ``LLM``.", ":doc:`/reference/llm` shows how to use it.", "")
    public = {name: getattr(penstock_local, name) for name in penstock_local.__all__}
    engines = ["LLM", "LLMEngine", "AsyncLLMEngine"]
    parameters = ["SamplingParams", "StructuredOutput", "BeamSearchParams", "OutputKind", "JsonWhitespace"]
    errors = [name for name, value in public.items() if issubclass(value, BaseException)]
    results = [name for name in public if name not in {*engines, *parameters, *errors}]
    yield from _title("Engines", "-")
    yield from _objects("penstock_local", engines)
    yield from _title("Options of LLM", "-")
    yield from (
        "``LLM(model, **options)`` takes these options. The setting is the one of an engine's configuration file.",
        "",
    )
    yield from _options()
    yield from _title("Parameters of requests", "-")
    yield from _objects("penstock_local", parameters)
    yield from _title("Results", "-")
    yield from _objects("penstock_local", results)
    yield from _title("Errors", "-")
    yield from _objects("penstock_local", errors, "autoexception")


def _options() -> Iterator[str]:
    """Yield a definition for each option: name, default and setting, then the meaning."""
    settings: dict[str, Setting] = {
        setting.key: setting for section in sections_of(EngineCoreConfig) for setting in section.settings
    }
    for name, (section, field) in sorted(OPTIONS.items()):
        setting = settings.get(f"{section}.{field}")
        if setting is None:  # a section of its own
            yield from (
                f"``{name}``: fields of the section ``{section}``",
                "    A mapping; see :doc:`/reference/settings`.",
                "",
            )
            continue
        yield f"``{name}``: default ``{setting.default_text}``, setting ``{setting.key}``"
        yield from (f"    {setting.kind.description.replace('`', '``').replace('````', '``')}", "")


def _objects(module: str, names: list[str], directive: str = "autoclass") -> Iterator[str]:
    for name in names:
        yield f".. {directive}:: {module}.{name}"
        if directive != "autofunction":
            yield from ("   :members:", f"   :inherited-members: {_OTHERS}")
        yield ""


def _title(text: str, underline: str) -> tuple[str, ...]:
    return (text, underline * len(text), "")
