"""Rows of the dashboard for engineers on call, ordered from symptoms that clients notice to their causes."""

from charts.monitoring.engine_panels import ADAPTERS, BLOCKS, ENGINES, MEDIA
from charts.monitoring.panel import OF_ENGINES, OF_POOLS, OF_RELEASE, Panel, Row, quantiles, rate

TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            "Requests",
            "reqps",
            "Requests that ended normally, by finish reason.",
            {"{{finished_reason}}": rate("vllm:request_success_total", by="finished_reason")},
            stacked=True,
        ),
        Panel(
            "Tokens",
            "short",
            "Tokens per second: prompt tokens, prompt tokens found in the prefix cache, and output tokens.",
            {
                "prompts": rate("vllm:prompt_tokens_total"),
                "from the cache": rate("vllm:prefix_cache_hits_total", OF_ENGINES),
                "outputs": rate("vllm:generation_tokens_total"),
            },
        ),
        Panel(
            "In flight",
            "short",
            "Calls in progress on frontends, and requests that frontends hold because no engine accepts them.",
            {
                "{{pod}}": f"penstock:requests_in_flight{{{OF_RELEASE}}}",
                "held by {{pod}}": f"penstock:requests_held{{{OF_RELEASE}}}",
            },
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "s",
            "Time from the arrival of a request to its first token.",
            quantiles("vllm:time_to_first_token_seconds"),
        ),
        Panel(
            "Time between tokens",
            "s",
            "Time between two consecutive outputs of a sequence.",
            quantiles("vllm:inter_token_latency_seconds"),
        ),
        Panel(
            "Time in the queue",
            "s",
            "Time that a request waits in the engine's queue until it is first scheduled. The time grows when engines are full.",
            quantiles("vllm:request_queue_time_seconds"),
        ),
        Panel(
            "Time of a request",
            "s",
            "Time from the arrival of a request to its last token.",
            quantiles("vllm:e2e_request_latency_seconds"),
        ),
    ),
)

ERRORS = Row(
    "Errors",
    (
        Panel(
            "Failed",
            "reqps",
            "Failed calls, by code. UNAVAILABLE and INTERNAL are errors of the service. RESOURCE_EXHAUSTED means too much load."
            " Other codes are errors of clients.",
            {"{{code}}": rate("penstock:requests_failed_total", by="code")},
            stacked=True,
        ),
        Panel(
            "Refused",
            "reqps",
            "Requests that were not accepted, by reason.",
            {"{{reason}}": rate("penstock:requests_refused_total", by="reason")},
            stacked=True,
        ),
        Panel(
            "Moves and NaN",
            "short",
            "Per second: sequences that moved to another engine, and NaN logits.",
            {
                "moved": rate("penstock:requests_moved_total"),
                "NaN of {{pod}}": rate("penstock:nan_logits_total", OF_ENGINES, by="pod"),
            },
        ),
    ),
)

COORDINATOR = Row(
    "Coordinator",
    (
        Panel(
            "Engines by state",
            "short",
            "Engines that the coordinator knows, by state. Only serving engines get new requests.",
            {"{{state}}": f"sum by (state) (penstock_coordinator_engines{{{OF_RELEASE}}})"},
            stacked=True,
        ),
        Panel(
            "Connected",
            "short",
            "Frontends connected to the coordinator, running frontends, and pods without a connection to the coordinator.",
            {
                "frontends connected": f"sum(penstock_coordinator_frontends{{{OF_RELEASE}}})",
                "frontends running": f'sum(up{{{OF_RELEASE},component="frontend"}})',
                "without a coordinator": f"count(penstock:coordinator_connected{{{OF_RELEASE}}} == 0) or vector(0)",
            },
        ),
        Panel(
            "Variants and versions",
            "short",
            "Number of variants and of versions. Several variants: engines compute different tokens. Several versions: releases"
            " are mixed, as during a rollout.",
            {
                "variants": f"max(penstock:engine_variants{{{OF_RELEASE}}})",
                "versions": f"count(count by (version) (penstock:build_info{{{OF_RELEASE}}}))",
            },
        ),
    ),
)

AUTOSCALING = Row(
    "Autoscaling",
    (
        Panel(
            "Engines needed",
            "short",
            "Number of engines that a pool has, and number that it needs for its target load. If a pool needs more engines than"
            " it has, autoscaling is off, the pool is at its maximum, or pods wait for a GPU.",
            {
                "{{pool}} has": f"penstock_coordinator_pool_engines{{{OF_POOLS}}}",
                "{{pool}} wants": f"penstock_coordinator_pool_wanted_replicas{{{OF_POOLS}}}",
            },
        ),
        Panel(
            "Demand for engines",
            "short",
            "Load, including requests held by frontends, and KV cache usage. Both are expressed as a number of engines.",
            {
                "load of {{pool}}": f"penstock_coordinator_pool_load{{{OF_POOLS}}}",
                "KV cache of {{pool}}": f"penstock_coordinator_pool_kv_cache_usage{{{OF_POOLS}}}",
            },
        ),
        Panel(
            "Held",
            "short",
            "Requests that frontends hold, as reported to the coordinator. If a pool has no engine, held requests make the"
            " autoscaler start one.",
            {"held": f"sum(penstock_coordinator_held_requests{{{OF_RELEASE}}})"},
        ),
    ),
)

PROCESSES = Row(
    "Processes",
    (
        Panel(
            "CPU",
            "short",
            "CPU cores in use. The event loop of a frontend uses at most one core.",
            {"{{pod}}": rate("process_cpu_seconds_total", by="pod")},
        ),
        Panel(
            "Memory",
            "bytes",
            "Resident memory.",
            {"{{pod}}": f"sum by (pod) (process_resident_memory_bytes{{{OF_RELEASE}}})"},
        ),
        Panel(
            "Starts",
            "short",
            "Number of process starts within an hour. A high number means that processes exit and restart.",
            {"{{pod}}": f"sum by (pod) (changes(process_start_time_seconds{{{OF_RELEASE}}}[1h]))"},
        ),
    ),
)

ROWS = (TRAFFIC, LATENCY, ERRORS, ENGINES, ADAPTERS, MEDIA, BLOCKS, COORDINATOR, AUTOSCALING, PROCESSES)
