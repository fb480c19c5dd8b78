"""Panels of the dashboard about engines, row by row."""

from charts.monitoring.panel import OF_ENGINES, OF_RELEASE, OVER, Panel, Row, of_pools, quantiles, rate, share


def _engines_with(names: str) -> str:
    """Engines whose list ``names`` of adapters is not empty; 0 where engines serve adapters and none has one there."""
    info = "vllm:lora_requests_info"
    return f'count by (pool) ({info}{{{OF_ENGINES},{names}!=""}}) or 0 * count by (pool) ({info}{{{OF_ENGINES}}})'


ENGINES = Row(
    "Engines",
    (
        Panel(
            "Load",
            "percentunit",
            "Requests running and waiting over the slots of the pool's engines: above 1 there is a queue.",
            {"{{pool}}": of_pools("penstock:load"), "fullest of {{pool}}": of_pools("penstock:load", "max")},
        ),
        Panel(
            "KV cache",
            "percentunit",
            "Used fraction. Near 1, requests wait or are preempted.",
            {
                "{{pool}}": of_pools("vllm:kv_cache_usage_perc"),
                "fullest of {{pool}}": of_pools("vllm:kv_cache_usage_perc", "max"),
            },
        ),
        Panel(
            "Running and waiting",
            "short",
            "Requests with KV blocks, and those in the engines' queues.",
            {
                "running in {{pool}}": of_pools("vllm:num_requests_running", "sum"),
                "waiting in {{pool}}": of_pools("vllm:num_requests_waiting", "sum"),
            },
        ),
        Panel(
            "Steps",
            "short",
            "Steps per second. 0 while requests run: the engine is stuck.",
            {"{{pod}}": rate("penstock:engine_steps_total", OF_ENGINES, by="pod")},
        ),
        Panel(
            "Tokens of a step",
            "short",
            "Tokens computed by a step, on average.",
            {
                "{{pool}}": share(
                    "vllm:iteration_tokens_total_sum", "vllm:iteration_tokens_total_count", OF_ENGINES, "pool"
                )
            },
        ),
        Panel(
            "Drafts",
            "short",
            "Tokens per second that were guessed ahead, and those of them that the model chose: each of these saved a step.",
            {
                "drafted in {{pool}}": rate("vllm:spec_decode_num_draft_tokens_total", OF_ENGINES, by="pool"),
                "accepted in {{pool}}": rate("vllm:spec_decode_num_accepted_tokens_total", OF_ENGINES, by="pool"),
            },
        ),
        Panel(
            "Preemptions",
            "short",
            "Requests per second that lost their KV blocks to another: work that is done again.",
            {"{{pool}}": rate("vllm:num_preemptions_total", OF_ENGINES, by="pool")},
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
            {"{{pool}}": rate("penstock:lora_requests_total", OF_ENGINES, by="pool")},
            stacked=True,
        ),
        Panel(
            "Found in memory",
            "percentunit",
            "Of these, requests whose adapter the engine had: the others waited for it to be read. Low, with evictions:"
            " lora.cpu_memory is too small for the adapters in use.",
            {
                "{{pool}}": share(
                    "penstock:lora_requests_found_total", "penstock:lora_requests_total", OF_ENGINES, "pool"
                )
            },
        ),
        Panel(
            "Time of a load",
            "s",
            "Seconds that an engine took to read an adapter, on average.",
            {"{{pool}}": share("penstock:lora_load_seconds_total", "penstock:lora_loads_total", OF_ENGINES, "pool")},
        ),
        Panel(
            "Loads and evictions",
            "short",
            "Adapters per second that engines read, and that made room for others.",
            {
                "loaded in {{pool}}": rate("penstock:lora_loads_total", OF_ENGINES, by="pool"),
                "evicted in {{pool}}": rate("penstock:lora_evictions_total", OF_ENGINES, by="pool"),
            },
        ),
        Panel(
            "Memory of adapters",
            "bytes",
            "Host memory that adapters take. Full is lora.cpu_memory of each worker.",
            {
                "{{pool}}": of_pools("penstock:lora_cached_bytes"),
                "fullest of {{pool}}": of_pools("penstock:lora_cached_bytes", "max"),
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
            {"{{source}}": f"max by (source) (penstock:lora_names{{{OF_RELEASE}}})"},
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
                f"(rate(penstock:media_seconds_bucket{{{OF_RELEASE}}}{OVER})))"
            },
        ),
        Panel(
            "Items not taken",
            "reqps",
            "Items that were refused, by reason: files that cannot be read or are too large, hosts that are not allowed or do not"
            " answer.",
            {"{{reason}}": rate("penstock:media_refused_total", by="reason")},
            stacked=True,
        ),
        Panel(
            "Found",
            "percentunit",
            "Items that a frontend had processed before, and of those that were sent, items that the engine had already.",
            {
                "processed": f"{rate('penstock:media_store_hits_total')} / {rate('penstock:media_store_queries_total')}",
                "at the engine": f"{rate('vllm:mm_cache_hits_total')} / {rate('vllm:mm_cache_queries_total')}",
            },
        ),
        Panel(
            "Sent to engines",
            "Bps",
            "Bytes of processed media, by the way that they took.",
            {"{{transport}}": rate("penstock:media_sent_bytes_total", by="transport")},
            stacked=True,
        ),
        Panel(
            "Media workers replaced",
            "short",
            "Media workers per second that ended, or were ended because of what they had to decode.",
            {"replaced": rate("penstock:media_workers_replaced_total")},
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
                "{{pool}}": share(
                    "vllm:external_prefix_cache_hits_total",
                    "vllm:external_prefix_cache_queries_total",
                    OF_ENGINES,
                    "pool",
                )
            },
        ),
        Panel(
            "Bytes",
            "Bps",
            "Bytes of blocks that engines got and gave, by the way on which they went; host and disk are an engine's own.",
            {
                "{{direction}} by {{transport}}": rate(
                    "penstock:kv_transfer_bytes_total", OF_ENGINES, by="direction, transport"
                )
            },
        ),
        Panel(
            "Time of a transfer",
            "s",
            "From asking for blocks to the last of them, the 95th of a hundred.",
            {
                "{{transport}}": "histogram_quantile(0.95, sum by (le, transport) "
                f"(rate(penstock:kv_transfer_seconds_bucket{{{OF_ENGINES}}}{OVER})))"
            },
        ),
        Panel(
            "Failures",
            "short",
            "Blocks that failed to transfer, per second and by reason (docs/guides/kv-offloading.md). Engines recomputed them.",
            {"{{reason}}": rate("penstock:kv_transfer_failures_total", OF_ENGINES, by="reason")},
            stacked=True,
        ),
        Panel(
            "Kept for others",
            "short",
            "Blocks that are kept for engines that go on with requests, and requests whose blocks these are.",
            {
                "blocks of {{pool}}": of_pools("penstock:kv_leased_blocks", "sum"),
                "requests of {{pool}}": of_pools("penstock:kv_leases", "sum"),
            },
        ),
        Panel(
            "Host memory and disks",
            "percentunit",
            "Used part of the room beside the KV cache.",
            {"{{medium}} of {{pool}}": f"avg by (pool, medium) (penstock:kv_tier_usage_perc{{{OF_ENGINES}}})"},
        ),
        Panel(
            "Legs",
            "reqps",
            "Calls by whether they went to an engine of prompts and then to one of outputs, and why.",
            {"{{plan}}: {{why}}": rate("penstock:legs_total", by="plan, why")},
            stacked=True,
        ),
        Panel(
            "Gap at a handover",
            "s",
            "From a sequence's handoff to its next output.",
            quantiles("penstock:handover_gap_seconds"),
        ),
    ),
)
