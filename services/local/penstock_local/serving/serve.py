"""Implementation of ``penstock serve``: starts the coordinator, engines and frontends on this machine."""

import asyncio
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock_client import AsyncClient, Model
from penstock_common.addresses import with_port
from penstock_common.errors import ConfigError
from penstock_common.memory import host_memory
from penstock_common.process import usable_cores
from penstock_local.console import BOLD, GREEN, JoinedLog, paint, say
from penstock_local.flags import DEFAULT_ADMIN_ADDRESS
from penstock_local.rpc.client import client_of, pools
from penstock_local.rpc.connect import SERVICE
from penstock_local.serving.machine_resources import LOOPBACK, free_ports, visible_gpus
from penstock_local.serving.plan import (
    check,
    check_configs,
    engine_spec,
    max_loras,
    needs_secret,
    num_internal_ports,
    plan,
    threads_per_engine,
)
from penstock_local.serving.serve_options import ServeOptions
from penstock_local.serving.supervisor import GroupRanks, ProcessSpec, StopRequest, Supervisor, first_of, run

_SECRET_BYTES = 32


@contextmanager
def secret_file(wanted: bool) -> Iterator[str]:
    """Write a new secret into a file that only this user can read, and remove the file at the end.

    Yields the file's path, or an empty string if ``wanted`` is False.
    """
    if not wanted:
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = Path(folder) / "secret"
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(_SECRET_BYTES) + "\n", encoding="ascii")
        yield str(path)


_POLL_SECONDS = 0.02
_MOST_NAMES = 8
"""Maximum number of adapters that the ready message names."""

Work = Callable[[AsyncClient, Sequence[Model], JoinedLog], Coroutine[Any, Any, None]]


async def serve(options: ServeOptions) -> int:
    """Serve until asked to stop, and return the exit code.

    Raises ConfigError before the start, and ServiceDiedError after it.
    """
    started = time.monotonic()

    async def until_stopped(_client: AsyncClient, models: Sequence[Model], _log: JoinedLog) -> None:
        sys.stdout.write(ready_block(options, models, seconds=time.monotonic() - started) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

    return await serve_while(options, until_stopped)


async def serve_while(options: ServeOptions, work: Work) -> int:
    """Start the services, run ``work`` against them, and stop them. Returns and raises the same as ``supervisor.run``."""
    gpus = visible_gpus(os.environ)
    check(options, gpus=gpus, memory=host_memory(), environ=os.environ)
    with secret_file(needs_secret(options)) as secret:
        return await _serve_while(options, work, gpus, secret)


async def _serve_while(options: ServeOptions, work: Work, gpus: Sequence[str], secret: str) -> int:
    """Run the services. ``secret`` is the path of the engines' shared secret, or empty if they need no secret."""
    request = StopRequest()
    given = {port for _, port in options.all_ports}
    internal_ports = free_ports(num_internal_ports(options), but=given)
    specs = plan(options, internal_ports=internal_ports, cores=usable_cores(), gpus=gpus, secret_file=secret)
    check_configs(specs)
    log = JoinedLog([spec.name for spec in specs], stream=sys.stderr, on_closed=request.stop.set)
    supervisor = Supervisor(specs, on_line=log.write)
    coordinator = specs[0].address
    threads = threads_per_engine(options, options, usable_cores())

    def one_more(number: int) -> ProcessSpec:
        port = free_ports(1, but=given)[0]
        return engine_spec(options, number, port, coordinator, threads=threads, secret_file=secret)

    async def when_ready() -> None:
        async with client_of(options.client_address) as client:
            models = [await _with_all_engines(client, each) for each in options.models]
            if options.data_parallel_size > 1:
                await first_of(work(client, models, log), GroupRanks(supervisor, coordinator, one_more).run())
            else:
                await work(client, models, log)

    with request.listening():
        names = " and ".join(each.model_name for each in options.models)
        say(f"starting {names}: {', '.join(spec.name for spec in specs)}")
        return await run(supervisor, request, when_ready)


async def _with_all_engines(client: AsyncClient, options: ServeOptions) -> Model:
    """Wait until the frontend is connected to all engines, and return the served model."""
    while True:
        models = {model.name: model for model in await client.models()}
        if options.model_name not in models:
            raise ConfigError(f"the frontend serves {sorted(models)}, not {options.model_name!r}")
        if models[options.model_name].num_engines >= options.num_engines:
            return models[options.model_name]
        await asyncio.sleep(_POLL_SECONDS)


def ready_block(options: ServeOptions, models: Sequence[Model], *, seconds: float) -> str:
    """Return the message that tells the user how to reach the services. ``models`` are in the order of the options."""
    host = "localhost" if options.client_host == LOOPBACK else options.client_host
    address = with_port(host, options.grpc_port)
    elsewhere = "" if options.grpc_port == 50051 and host == "localhost" else f" --address {address}"
    title = paint(f"Penstock is ready after {seconds:.1f} s", GREEN, sys.stdout)
    served = list(zip(options.models, models, strict=True))
    calls = [call for each, model in served for call in _first_calls(options, model, host, elsewhere)]
    first_call = "\n    ".join(paint(line, BOLD, sys.stdout) for line in [*calls, _status_call(options)])
    lines = "".join(_model_lines(each, model) for each, model in served)
    return f"""
  {title}

    gRPC    {address}   {SERVICE}
    HTTP    http://{with_port(host, options.http_port)}   a page to try it, OpenAI API at /v1, /health, /metrics
{_operators_lines(options)}
{lines}
  Try it in another terminal:

    {first_call}

  or with any gRPC client: the server describes its services by reflection. Ctrl-C stops everything.
"""


def _model_lines(options: ServeOptions, model: Model) -> str:
    """Return the lines about one model and its adapters."""
    engines = "1 engine" if options.num_engines == 1 else f"{options.num_engines} engines"
    if options.data_parallel_size > 1:
        engines += " in one data-parallel group"
    if options.prefill_engines:
        engines += f", {options.prefill_engines} of them for prefill"
    return f"    model   {model.name}, {engines}, up to {model.max_model_len} tokens\n{_adapters_line(options)}"


def _status_call(options: ServeOptions) -> str:
    addresses = [f"localhost:{port}" for port in options.admin_ports]
    if addresses == [DEFAULT_ADMIN_ADDRESS]:
        return "penstock status"
    return " ".join(["penstock status", *(f"--admin-address {address}" for address in addresses)])


def _operators_lines(options: ServeOptions) -> str:
    """Return the lines with the address of the admin API. If there are several frontends, the lines also have the
    metrics address of each frontend.
    """
    service = "penstock.admin.v1.AdminService"
    if options.frontends == 1:
        return f"    admin   localhost:{options.admin_port}   {service}"
    ports = zip(options.admin_ports, options.metrics_ports, strict=True)
    lines = [
        f"            frontend-{i}: admin localhost:{admin}, metrics http://localhost:{metrics}/metrics"
        for i, (admin, metrics) in enumerate(ports)
    ]
    return "\n".join([f"    admin   {service}, of each of the frontends that share the ports above:", *lines])


def _adapters_line(options: ServeOptions) -> str:
    """Return the line with the adapter names that requests can use as the model, and the maximum number of different
    adapters in one batch. Empty if there are no adapters.
    """
    names = [*sorted(options.lora)[:_MOST_NAMES], *(["..."] if len(options.lora) > _MOST_NAMES else [])]
    if options.lora_directory:
        names.append(f"those in {options.lora_directory}")
    return f"    LoRA    {', '.join(names)} ({max_loras(options)} at once)\n" if names else ""


def _first_calls(options: ServeOptions, model: Model, host: str, elsewhere: str) -> list[str]:
    """Return example commands for this model. ``elsewhere`` is the flag for an address other than the default."""
    several = bool(options.further)
    if not pools(model):
        where = f" --model {model.name}{elsewhere}" if several else elsewhere
        return [f'penstock generate "Once upon a time" --max-tokens 60{where}', f"penstock chat{where}"]
    if "embed" in model.capabilities:
        body = f'{{"model": "{model.name}", "input": "Once upon a time"}}'
        url = f"http://{with_port(host, options.http_port)}/v1/embeddings"
        return [f"curl {url} -H 'content-type: application/json' -d '{body}'"]
    named = f'"model": "{model.name}", ' if several else ""
    if "score" in model.capabilities:
        method, body = (
            "Score",
            f'{{{named}"query": {{"text": "Who sleeps?"}}, "documents": [{{"text": "The cat sleeps."}}]}}',
        )
    else:
        method, body = "Classify", f'{{{named}"inputs": [{{"text": "Once upon a time"}}]}}'
    return [f"grpcurl -plaintext -d '{body}' {with_port(host, options.grpc_port)} {SERVICE}/{method}"]
