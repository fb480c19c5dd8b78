"""Settings of an engine that have an effect only together with another one."""

from penstock_common.config.needs import ABOVE_ONE, Need, Needs, When, on
from penstock_common.config.shared_needs import OF_ALL

_MOVES_BLOCKS = When(setting="kv_transfer.transport", values=("auto", "grpc", "shared_memory", "nixl"))
_TENSOR_PARALLEL = When(setting="executor.tensor_parallel_size", off=ABOVE_ONE)
_PIPELINE_PARALLEL = When(setting="executor.pipeline_parallel_size", off=ABOVE_ONE)
_DRAFTS = When(setting="speculative.method", values=("draft_model", "eagle", "eagle3"))
_NGRAM = When(setting="speculative.method", values=("ngram",))
_SUFFIX = When(setting="speculative.method", values=("suffix",))
_GROUPED = When(setting="data_parallel.size", off=ABOVE_ONE)

NEEDS: Needs = (
    *OF_ALL,
    Need(("coordinator.stats_interval", "coordinator.reconnect_max", "coordinator.tls."), (on("coordinator.address"),)),
    Need(("coordinator.advertise",), (on("coordinator.address"), _MOVES_BLOCKS)),
    Need(("peers.",), (on("server.tls.ca"),)),
    Need(("cache.enable_kv_events", "cache.host_memory"), (on("cache.enable_prefix_caching"),)),
    Need(("cache.disk",), (on("cache.host_memory"),)),
    Need(("cache.disk_size",), (on("cache.disk"),)),
    Need(("cache.min_load_tokens",), (on("cache.host_memory"), _MOVES_BLOCKS, on("kv_transfer.connector"))),
    Need(("scheduler.long_prefill_token_threshold",), (on("scheduler.enable_chunked_prefill"),)),
    Need(
        (
            *("scheduler.max_num_encoder_tokens", "multimodal.encoder_cache_size", "multimodal.limit_per_prompt"),
            "multimodal.receiver_cache_bytes",
        ),
        (on("multimodal.enabled"),),
    ),
    Need(("executor.stage_layers",), (_PIPELINE_PARALLEL,)),
    Need(("executor.collectives",), (_TENSOR_PARALLEL,)),
    Need(
        (
            *("executor.nodes.index", "executor.nodes.leader", "executor.nodes.port", "executor.nodes.address"),
            *("executor.nodes.timeout", "executor.nodes.tls."),
        ),
        (When(setting="executor.nodes.size", off=ABOVE_ONE),),
    ),
    Need(("kernels.capture_at_start", "kernels.graph_sizes"), (on("kernels.graphs"),)),
    Need(("kernels.graph_sizes",), (on("kernels.capture_at_start"),)),
    Need(("speculative.num_speculative_tokens", "speculative.adaptive"), (on("speculative.method"),)),
    Need(("speculative.model", "speculative.draft_sampling"), (_DRAFTS,)),
    Need(("speculative.revision",), (on("speculative.model"),)),
    Need(("speculative.prompt_lookup_min", "speculative.prompt_lookup_max"), (_NGRAM,)),
    Need(
        (
            *("speculative.suffix_decoding_max_tree_depth", "speculative.suffix_decoding_max_spec_factor"),
            *("speculative.suffix_decoding_min_token_prob", "speculative.suffix_decoding_cache_bytes"),
        ),
        (_SUFFIX,),
    ),
    Need(("lora.max_lora_rank", "lora.cpu_memory", "lora.max_wait"), (on("lora.max_loras"),)),
    Need(
        (
            *("data_parallel.on_rank_loss", "data_parallel.move_after", "data_parallel.address"),
            *("data_parallel.connect_timeout", "expert_parallel.enabled", "expert_parallel.prefill_interval"),
        ),
        (_GROUPED,),
    ),
    Need(
        (
            *("expert_parallel.slots", "expert_parallel.window", "expert_parallel.move_bytes_per_step"),
            "expert_parallel.dispatch",
        ),
        (on("expert_parallel.enabled"),),
    ),
    Need(
        (
            *("kv_transfer.port", "kv_transfer.advertise", "kv_transfer.allowed_addresses", "kv_transfer.lease"),
            *("kv_transfer.max_lease", "kv_transfer.max_leased_fraction", "kv_transfer.silence", "kv_transfer.tls."),
        ),
        (_MOVES_BLOCKS,),
    ),
    Need(("kv_transfer.arena",), (When(setting="kv_transfer.transport", values=("auto", "shared_memory", "nixl")),)),
    Need(("error_dump.include_tokens",), (on("error_dump.directory"),)),
)
