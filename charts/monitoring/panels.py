"""What the dashboard shows, row by row, for who is on call: from what clients notice to what causes it."""

import msgspec

_RELEASE = 'namespace="$namespace",release="$release"'
_ENGINES = f'{_RELEASE},component="enginecore",pool=~"$pool"'
_POOLS = f'{_RELEASE},pool=~"$pool"'
"""Of what the coordinator says of pools."""
_OVER = "[$__rate_interval]"


class Panel(msgspec.Struct, frozen=True):
    """A graph. ``queries``: PromQL by the name of its lines, in Grafana's ``{{label}}`` notation. ``unit``: one of Grafana's."""

    title: str
    unit: str
    description: str
    queries: dict[str, str]
    stacked: bool = False


class Row(msgspec.Struct, frozen=True):
    """Panels side by side under a title."""

    title: str
    panels: tuple[Panel, ...]


def _quantiles(histogram: str) -> dict[str, str]:
    buckets = f"sum by (le) (rate({histogram}_bucket{{{_RELEASE}}}{_OVER}))"
    return {f"p{share * 100:.0f}": f"histogram_quantile({share}, {buckets})" for share in (0.5, 0.95, 0.99)}


def _rate(counter: str, labels: str = _RELEASE, by: str = "") -> str:
    return f"sum {f'by ({by}) ' if by else ''}(rate({counter}{{{labels}}}{_OVER}))"


def _share(part: str, whole: str, labels: str, by: str) -> str:
    return f"{_rate(part, labels, by)} / {_rate(whole, labels, by)}"


def _of_pools(gauge: str, how: str = "avg") -> str:
    return f"{how} by (pool) ({gauge}{{{_ENGINES}}})"


def _engines_with(names: str) -> str:
    """Engines whose list ``names`` of adapters is not empty; 0 where engines serve adapters and none has one there."""
    info = "vllm:lora_requests_info"
    return f'count by (pool) ({info}{{{_ENGINES},{names}!=""}}) or 0 * count by (pool) ({info}{{{_ENGINES}}})'


TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            "Requests",
            "reqps",
            "Requests that ended normally, by the reason why they ended.",
            {"{{finished_reason}}": _rate("vllm:request_success_total", by="finished_reason")},
            stacked=True,
        ),
        Panel(
            "Tokens",
            "short",
            "Tokens per second: of prompts, of them those found in the prefix cache, and of outputs.",
            {
                "prompts": _rate("vllm:prompt_tokens_total"),
                "from the cache": _rate("vllm:prefix_cache_hits_total", _ENGINES),
                "outputs": _rate("vllm:generation_tokens_total"),
            },
        ),
        Panel(
            "In flight",
            "short",
            "Calls that frontends serve at once, and requests that they hold because no engine takes them.",
            {
                "{{pod}}": f"penstock:requests_in_flight{{{_RELEASE}}}",
                "held by {{pod}}": f"penstock:requests_held{{{_RELEASE}}}",
            },
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        Panel(
            "To the first token",
            "s",
            "From arrival to the first token.",
            _quantiles("vllm:time_to_first_token_seconds"),
        ),
        Panel(
            "Between tokens",
            "s",
            "From one output of a sequence to the next.",
            _quantiles("vllm:inter_token_latency_seconds"),
        ),
        Panel(
            "In the queue",
            "s",
            "From the engine's queue until first scheduled: grows when engines are full.",
            _quantiles("vllm:request_queue_time_seconds"),
        ),
        Panel(
            "Whole requests",
            "s",
            "From arrival to the last token.",
            _quantiles("vllm:e2e_request_latency_seconds"),
        ),
    ),
)

ERRORS = Row(
    "Errors",
    (
        Panel(
            "Failed",
            "reqps",
            "Calls that failed. UNAVAILABLE and INTERNAL are ours, RESOURCE_EXHAUSTED is too much load, the rest the clients'.",
            {"{{code}}": _rate("penstock:requests_failed_total", by="code")},
            stacked=True,
        ),
        Panel(
            "Refused",
            "reqps",
            "Requests that were not accepted, by reason.",
            {"{{reason}}": _rate("penstock:requests_refused_total", by="reason")},
            stacked=True,
        ),
        Panel(
            "Moved and NaN",
            "short",
            "Sequences that left their engine and went on on another one; logits that were NaN. Per second.",
            {
                "moved": _rate("penstock:requests_moved_total"),
                "NaN of {{pod}}": _rate("penstock:nan_logits_total", _ENGINES, by="pod"),
            },
        ),
    ),
)

ENGINES = Row(
    "Engines",
    (
        Panel(
            "Load",
            "percentunit",
            "Requests running and waiting over the slots of the pool's engines: above 1 there is a queue.",
            {"{{pool}}": _of_pools("penstock:load"), "fullest of {{pool}}": _of_pools("penstock:load", "max")},
        ),
        Panel(
            "KV cache",
            "percentunit",
            "Used fraction. Near 1, requests wait or are preempted.",
            {
                "{{pool}}": _of_pools("vllm:kv_cache_usage_perc"),
                "fullest of {{pool}}": _of_pools("vllm:kv_cache_usage_perc", "max"),
            },
        ),
        Panel(
            "Running and waiting",
            "short",
            "Requests with KV blocks, and those in the engines' queues.",
            {
                "running in {{pool}}": _of_pools("vllm:num_requests_running", "sum"),
                "waiting in {{pool}}": _of_pools("vllm:num_requests_waiting", "sum"),
            },
        ),
        Panel(
            "Steps",
            "short",
            "Steps per second. 0 while requests run: the engine is stuck.",
            {"{{pod}}": _rate("penstock:engine_steps_total", _ENGINES, by="pod")},
        ),
        Panel(
            "Tokens of a step",
            "short",
            "Tokens computed by a step, on average.",
            {
                "{{pool}}": _share(
                    "vllm:iteration_tokens_total_sum", "vllm:iteration_tokens_total_count", _ENGINES, "pool"
                )
            },
        ),
        Panel(
            "Drafts",
            "short",
            "Tokens per second that were guessed ahead, and those of them that the model chose: each of these saved a step.",
            {
                "drafted in {{pool}}": _rate("vllm:spec_decode_num_draft_tokens_total", _ENGINES, by="pool"),
                "accepted in {{pool}}": _rate("vllm:spec_decode_num_accepted_tokens_total", _ENGINES, by="pool"),
            },
        ),
        Panel(
            "Preemptions",
            "short",
            "Requests per second that lost their KV blocks to another: work that is done again.",
            {"{{pool}}": _rate("vllm:num_preemptions_total", _ENGINES, by="pool")},
        ),
    ),
)

ADAPTERS = Row(
    "LoRA adapters",
    (
        Panel(
            "Requests with adapters",
            "reqps",
            "Requests that engines took with a LoRA adapter.",
            {"{{pool}}": _rate("penstock:lora_requests_total", _ENGINES, by="pool")},
            stacked=True,
        ),
        Panel(
            "Found in memory",
            "percentunit",
            "Of these, requests whose adapter the engine had: the others waited for it to be read. Low, with evictions:"
            " lora.cpu_memory is too small for the adapters in use.",
            {
                "{{pool}}": _share(
                    "penstock:lora_requests_found_total", "penstock:lora_requests_total", _ENGINES, "pool"
                )
            },
        ),
        Panel(
            "Time of a load",
            "s",
            "Seconds that an engine took to read an adapter, on average.",
            {"{{pool}}": _share("penstock:lora_load_seconds_total", "penstock:lora_loads_total", _ENGINES, "pool")},
        ),
        Panel(
            "Loads and evictions",
            "short",
            "Adapters per second that engines read, and that made room for others.",
            {
                "loaded in {{pool}}": _rate("penstock:lora_loads_total", _ENGINES, by="pool"),
                "evicted in {{pool}}": _rate("penstock:lora_evictions_total", _ENGINES, by="pool"),
            },
        ),
        Panel(
            "Memory of adapters",
            "bytes",
            "Host memory that adapters take. Full is lora.cpu_memory of each worker.",
            {
                "{{pool}}": _of_pools("penstock:lora_cached_bytes"),
                "fullest of {{pool}}": _of_pools("penstock:lora_cached_bytes", "max"),
            },
        ),
        Panel(
            "Engines with adapters",
            "short",
            "Engines where adapters run, and where some wait for others to end: lora.max_loras of the step are taken.",
            {
                "run in {{pool}}": _engines_with("running_lora_adapters"),
                "wait in {{pool}}": _engines_with("waiting_lora_adapters"),
            },
        ),
        Panel(
            "Names",
            "short",
            "Adapters that requests can name, by where the names come from.",
            {"{{source}}": f"max by (source) (penstock:lora_names{{{_RELEASE}}})"},
            stacked=True,
        ),
    ),
)

MEDIA = Row(
    "Images, sound and video",
    (
        Panel(
            "Time of an item",
            "s",
            "95% of items were fetched, waited for a media worker, and were decoded and processed, within so long.",
            {
                "{{stage}}": "histogram_quantile(0.95, sum by (le, stage) "
                f"(rate(penstock:media_seconds_bucket{{{_RELEASE}}}{_OVER})))"
            },
        ),
        Panel(
            "Items not taken",
            "reqps",
            "Items that were refused, by reason: files that cannot be read or are too large, hosts that are not allowed or do not"
            " answer.",
            {"{{reason}}": _rate("penstock:media_refused_total", by="reason")},
            stacked=True,
        ),
        Panel(
            "Found",
            "percentunit",
            "Items that a frontend had processed before, and of those that were sent, items that the engine had already.",
            {
                "processed": f"{_rate('penstock:media_store_hits_total')} / {_rate('penstock:media_store_queries_total')}",
                "at the engine": f"{_rate('vllm:mm_cache_hits_total')} / {_rate('vllm:mm_cache_queries_total')}",
            },
        ),
        Panel(
            "Sent to engines",
            "Bps",
            "Bytes of processed media, by the way that they took.",
            {"{{transport}}": _rate("penstock:media_sent_bytes_total", by="transport")},
            stacked=True,
        ),
        Panel(
            "Media workers replaced",
            "short",
            "Media workers per second that ended, or were ended because of what they had to decode.",
            {"replaced": _rate("penstock:media_workers_replaced_total")},
        ),
    ),
)

BLOCKS = Row(
    "Keys and values",
    (
        Panel(
            "Found elsewhere",
            "percentunit",
            "Of prompt tokens that were not in the KV cache, those that were loaded and not computed: from host memory, a disk or"
            " another engine.",
            {
                "{{pool}}": _share(
                    "vllm:external_prefix_cache_hits_total",
                    "vllm:external_prefix_cache_queries_total",
                    _ENGINES,
                    "pool",
                )
            },
        ),
        Panel(
            "Bytes",
            "Bps",
            "Bytes of blocks that engines got and gave, by the way on which they went; host and disk are an engine's own.",
            {
                "{{direction}} by {{transport}}": _rate(
                    "penstock:kv_transfer_bytes_total", _ENGINES, by="direction, transport"
                )
            },
        ),
        Panel(
            "Time of a transfer",
            "s",
            "From asking for blocks to the last of them, the 95th of a hundred.",
            {
                "{{transport}}": "histogram_quantile(0.95, sum by (le, transport) "
                f"(rate(penstock:kv_transfer_seconds_bucket{{{_ENGINES}}}{_OVER})))"
            },
        ),
        Panel(
            "Failures",
            "short",
            "Blocks that did not come, or were not sent, per second and by reason (docs/kv-transfer.md): they were computed.",
            {"{{reason}}": _rate("penstock:kv_transfer_failures_total", _ENGINES, by="reason")},
            stacked=True,
        ),
        Panel(
            "Kept for others",
            "short",
            "Blocks that are kept for engines that go on with requests, and requests whose blocks these are.",
            {
                "blocks of {{pool}}": f"sum by (pool) (penstock:kv_leased_blocks{{{_ENGINES}}})",
                "requests of {{pool}}": f"sum by (pool) (penstock:kv_leases{{{_ENGINES}}})",
            },
        ),
        Panel(
            "Host memory and disks",
            "percentunit",
            "Used part of the room beside the KV cache.",
            {"{{medium}} of {{pool}}": f"avg by (pool, medium) (penstock:kv_tier_usage_perc{{{_ENGINES}}})"},
        ),
        Panel(
            "Legs",
            "reqps",
            "Calls by whether they went to an engine of prompts and then to one of outputs, and why.",
            {"{{plan}}: {{why}}": _rate("penstock:legs_total", by="plan, why")},
            stacked=True,
        ),
        Panel(
            "Gap at a handover",
            "s",
            "From a sequence's handoff to its next output.",
            _quantiles("penstock:handover_gap_seconds"),
        ),
    ),
)

COORDINATOR = Row(
    "Coordinator",
    (
        Panel(
            "Engines by state",
            "short",
            "What the coordinator knows of engines. Only those that serve get new requests.",
            {"{{state}}": f"sum by (state) (penstock_coordinator_engines{{{_RELEASE}}})"},
            stacked=True,
        ),
        Panel(
            "Connected",
            "short",
            "Frontends that the coordinator has a stream with, frontends that run, and pods without a connection to it.",
            {
                "frontends connected": f"sum(penstock_coordinator_frontends{{{_RELEASE}}})",
                "frontends running": f'sum(up{{{_RELEASE},component="frontend"}})',
                "without a coordinator": f"count(penstock:coordinator_connected{{{_RELEASE}}} == 0) or vector(0)",
            },
        ),
        Panel(
            "Variants and versions",
            "short",
            "More than one: engines compute differently, or releases are mixed, as in a rollout.",
            {
                "variants": f"max(penstock:engine_variants{{{_RELEASE}}})",
                "versions": f"count(count by (version) (penstock:build_info{{{_RELEASE}}}))",
            },
        ),
    ),
)

AUTOSCALING = Row(
    "Autoscaling",
    (
        Panel(
            "Engines wanted",
            "short",
            "Engines that a pool has, and those with which it is as loaded as it shall be. More wanted than there are:"
            " nothing scales, or it is at its maximum, or pods wait for a GPU.",
            {
                "{{pool}} has": f"penstock_coordinator_pool_engines{{{_POOLS}}}",
                "{{pool}} wants": f"penstock_coordinator_pool_wanted_replicas{{{_POOLS}}}",
            },
        ),
        Panel(
            "What they are wanted for",
            "short",
            "Load, with what frontends hold, and KV usage, each in engines.",
            {
                "load of {{pool}}": f"penstock_coordinator_pool_load{{{_POOLS}}}",
                "KV cache of {{pool}}": f"penstock_coordinator_pool_kv_cache_usage{{{_POOLS}}}",
            },
        ),
        Panel(
            "Held",
            "short",
            "Requests that frontends hold, as the coordinator has heard: what wakes engines where there are none.",
            {"held": f"sum(penstock_coordinator_held_requests{{{_RELEASE}}})"},
        ),
    ),
)

PROCESSES = Row(
    "Processes",
    (
        Panel(
            "CPU",
            "short",
            "Cores in use. A frontend uses one at most for its event loop.",
            {"{{pod}}": _rate("process_cpu_seconds_total", by="pod")},
        ),
        Panel(
            "Memory",
            "bytes",
            "Resident set.",
            {"{{pod}}": f"sum by (pod) (process_resident_memory_bytes{{{_RELEASE}}})"},
        ),
        Panel(
            "Starts",
            "short",
            "Starts within an hour: engines that end and come back.",
            {"{{pod}}": f"sum by (pod) (changes(process_start_time_seconds{{{_RELEASE}}}[1h]))"},
        ),
    ),
)

ROWS = (TRAFFIC, LATENCY, ERRORS, ENGINES, ADAPTERS, MEDIA, BLOCKS, COORDINATOR, AUTOSCALING, PROCESSES)
