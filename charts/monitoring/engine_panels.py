"""Dashboard rows about engines."""

from charts.monitoring.panel import OF_ENGINES, OF_RELEASE, OVER, Panel, Row, of_pools, quantiles, rate, share


def _engines_with(names: str) -> str:
    """Return a query for the number of engines whose label ``names`` lists adapters, by pool. 0 if no engine lists any."""
    info = "vllm:lora_requests_info"
    return f'count by (pool) ({info}{{{OF_ENGINES},{names}!=""}}) or 0 * count by (pool) ({info}{{{OF_ENGINES}}})'


ENGINES = Row(
    "Engines",
    (
        Panel(
            "Load",
            "percentunit",
            "Running and waiting requests, divided by max_num_seqs of the pool's engines. If the load is above 1,"
            " requests queue.",
            {"{{pool}}": of_pools("penstock:load"), "fullest of {{pool}}": of_pools("penstock:load", "max")},
        ),
        Panel(
            "KV cache",
            "percentunit",
            "Used fraction of the KV cache. If it is near 1, requests wait or are preempted.",
            {
                "{{pool}}": of_pools("vllm:kv_cache_usage_perc"),
                "fullest of {{pool}}": of_pools("vllm:kv_cache_usage_perc", "max"),
            },
        ),
        Panel(
            "Running and waiting",
            "short",
            "Running requests, which have KV blocks, and waiting requests, which are in the engines' queues.",
            {
                "running in {{pool}}": of_pools("vllm:num_requests_running", "sum"),
                "waiting in {{pool}}": of_pools("vllm:num_requests_waiting", "sum"),
            },
        ),
        Panel(
            "Steps",
            "short",
            "Number of steps per second. If it is 0 while requests run, the engine hangs.",
            {"{{pod}}": rate("penstock:engine_steps_total", OF_ENGINES, by="pod")},
        ),
        Panel(
            "Tokens per step",
            "short",
            "Average number of tokens computed per step.",
            {
                "{{pool}}": share(
                    "vllm:iteration_tokens_total_sum", "vllm:iteration_tokens_total_count", OF_ENGINES, "pool"
                )
            },
        ),
        Panel(
            "Drafts",
            "short",
            "Drafted tokens per second, and accepted tokens per second. Each accepted token saves one step of its request.",
            {
                "drafted in {{pool}}": rate("vllm:spec_decode_num_draft_tokens_total", OF_ENGINES, by="pool"),
                "accepted in {{pool}}": rate("vllm:spec_decode_num_accepted_tokens_total", OF_ENGINES, by="pool"),
            },
        ),
        Panel(
            "Preemptions",
            "short",
            "Preemptions per second. A preempted request loses its KV blocks and is recomputed.",
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
            "Accepted requests per second that use a LoRA adapter.",
            {"{{pool}}": rate("penstock:lora_requests_total", OF_ENGINES, by="pool")},
            stacked=True,
        ),
        Panel(
            "Adapter in memory",
            "percentunit",
            "Fraction of requests with an adapter whose adapter was in the engine's memory. The other requests waited for a load."
            " If the fraction is low and adapters are evicted, lora.cpu_memory is too small for the adapters in use.",
            {
                "{{pool}}": share(
                    "penstock:lora_requests_found_total", "penstock:lora_requests_total", OF_ENGINES, "pool"
                )
            },
        ),
        Panel(
            "Time of a load",
            "s",
            "Average number of seconds that an engine took to load an adapter.",
            {"{{pool}}": share("penstock:lora_load_seconds_total", "penstock:lora_loads_total", OF_ENGINES, "pool")},
        ),
        Panel(
            "Loads and evictions",
            "short",
            "Adapters loaded and evicted per second.",
            {
                "loaded in {{pool}}": rate("penstock:lora_loads_total", OF_ENGINES, by="pool"),
                "evicted in {{pool}}": rate("penstock:lora_evictions_total", OF_ENGINES, by="pool"),
            },
        ),
        Panel(
            "Memory of adapters",
            "bytes",
            "Host memory used by adapters. The limit is lora.cpu_memory per worker.",
            {
                "{{pool}}": of_pools("penstock:lora_cached_bytes"),
                "fullest of {{pool}}": of_pools("penstock:lora_cached_bytes", "max"),
            },
        ),
        Panel(
            "Engines with adapters",
            "short",
            "Number of engines with running adapters, and number of engines where requests wait because lora.max_loras adapters"
            " run.",
            {
                "run in {{pool}}": _engines_with("running_lora_adapters"),
                "wait in {{pool}}": _engines_with("waiting_lora_adapters"),
            },
        ),
        Panel(
            "Names",
            "short",
            "Adapters that requests can name, by source of the name.",
            {"{{source}}": f"max by (source) (penstock:lora_names{{{OF_RELEASE}}})"},
            stacked=True,
        ),
    ),
)

MEDIA = Row(
    "Images, audio and video",
    (
        Panel(
            "Time of an item",
            "s",
            "95th percentile of the time per item, by stage: fetching, waiting for a media worker, decoding and processing.",
            {
                "{{stage}}": "histogram_quantile(0.95, sum by (le, stage) "
                f"(rate(penstock:media_seconds_bucket{{{OF_RELEASE}}}{OVER})))"
            },
        ),
        Panel(
            "Refused items",
            "reqps",
            "Refused items, by reason: files that cannot be read or are too large, hosts that are not allowed or do not"
            " answer.",
            {"{{reason}}": rate("penstock:media_refused_total", by="reason")},
            stacked=True,
        ),
        Panel(
            "Items in caches",
            "percentunit",
            "Fraction of items that a frontend had already processed, and fraction of items that the engine had already"
            " received.",
            {
                "processed": f"{rate('penstock:media_store_hits_total')} / {rate('penstock:media_store_queries_total')}",
                "at the engine": f"{rate('vllm:mm_cache_hits_total')} / {rate('vllm:mm_cache_queries_total')}",
            },
        ),
        Panel(
            "Sent to engines",
            "Bps",
            "Bytes of processed media sent to engines, by transport.",
            {"{{transport}}": rate("penstock:media_sent_bytes_total", by="transport")},
            stacked=True,
        ),
        Panel(
            "Media workers replaced",
            "short",
            "Media workers per second that crashed, or were stopped because an item took too much time or memory.",
            {"replaced": rate("penstock:media_workers_replaced_total")},
        ),
    ),
)

BLOCKS = Row(
    "KV transfer and offloading",
    (
        Panel(
            "Loaded tokens",
            "percentunit",
            "Fraction of the prompt tokens missing in the KV cache that were not computed, but loaded from host memory, disk or"
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
            "Bytes of KV blocks received and sent per second, by transport. The transports host and disk are transfers within an"
            " engine.",
            {
                "{{direction}} by {{transport}}": rate(
                    "penstock:kv_transfer_bytes_total", OF_ENGINES, by="direction, transport"
                )
            },
        ),
        Panel(
            "Time of a transfer",
            "s",
            "95th percentile of the time from the request for blocks until the last block arrived.",
            {
                "{{transport}}": "histogram_quantile(0.95, sum by (le, transport) "
                f"(rate(penstock:kv_transfer_seconds_bucket{{{OF_ENGINES}}}{OVER})))"
            },
        ),
        Panel(
            "Failures",
            "short",
            "Failed block transfers per second, by reason (docs/guides/kv-offloading.md). The engine recomputes these blocks.",
            {"{{reason}}": rate("penstock:kv_transfer_failures_total", OF_ENGINES, by="reason")},
            stacked=True,
        ),
        Panel(
            "Leased blocks",
            "short",
            "KV blocks leased for engines that resume requests, and the number of these requests.",
            {
                "blocks of {{pool}}": of_pools("penstock:kv_leased_blocks", "sum"),
                "requests of {{pool}}": of_pools("penstock:kv_leases", "sum"),
            },
        ),
        Panel(
            "Usage of host memory and disk",
            "percentunit",
            "Used fraction of host memory and disk for offloaded KV blocks.",
            {"{{medium}} of {{pool}}": f"avg by (pool, medium) (penstock:kv_tier_usage_perc{{{OF_ENGINES}}})"},
        ),
        Panel(
            "Calls by plan",
            "reqps",
            "Calls by routing plan (prefill engine first, then decode engine, or a single engine), and the reason for the plan.",
            {"{{plan}}: {{why}}": rate("penstock:legs_total", by="plan, why")},
            stacked=True,
        ),
        Panel(
            "Gap at a handover",
            "s",
            "Time from a sequence's handoff to its next output.",
            quantiles("penstock:handover_gap_seconds"),
        ),
    ),
)
