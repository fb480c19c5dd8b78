"""Flags of ``vllm serve`` and their values, and what ``penstock serve`` has for them."""

from collections.abc import Mapping

_NOT_COMPILED = "no model is compiled by torch; leave it out"
_TOOLS = "tools are read wherever the model's chat template shows them, by --set frontend.model.tool_parser=NAME; leave it out"
_LORA = "adapters are served by --lora NAME=PATH or --lora-directory DIR"

FLAGS: Mapping[str, str] = {
    "--model": "MODEL stands behind the command, without a flag: penstock serve MODEL",
    "--port": "--http-port is the OpenAI API's, --grpc-port the gRPC API's",
    "--api-key": "keys are in a file: --set frontend.auth.api_keys=FILE, with one of them in PENSTOCK_API_KEY",
    "--enable-auto-tool-choice": _TOOLS,
    "--enable-reasoning": "reasoning is read by --set frontend.model.reasoning_parser=NAME; leave it out",
    "--enable-lora": _LORA,
    "--lora-modules": _LORA,
    "--max-cpu-loras": "--set engine.lora.cpu_memory=SIZE bounds the adapters in host memory",
    "--enforce-eager": _NOT_COMPILED,
    "--compilation-config": _NOT_COMPILED,
    "--no-enable-prefix-caching": "use --set engine.cache.enable_prefix_caching=false",
    "--swap-space": "--host-cache SIZE is host memory for KV blocks",
    "--cpu-offload-gb": "weights stay where they are; --host-cache SIZE is host memory for KV blocks",
    "--kv-cache-memory-bytes": "use --kv-cache-memory SIZE",
    "--num-gpu-blocks-override": "use --set engine.cache.num_blocks=VALUE",
    "--distributed-executor-backend": "use --set engine.executor.kind=VALUE",
    "--scheduling-policy": "use --set engine.scheduler.policy=VALUE",
    "--api-server-count": "use --frontends N",
    "--uvicorn-log-level": "use --log-level LEVEL",
    "--enable-log-requests": "use --set frontend.log.requests=true",
    "--disable-log-requests": "requests are logged only with --set frontend.log.requests=true; leave it out",
    "--disable-log-stats": "--set engine.iteration_log_interval=0 turns the engines' line off",
    "--ssl-certfile": "use --set frontend.http.tls.certificate=FILE",
    "--ssl-keyfile": "use --set frontend.http.tls.key=FILE",
    "--download-dir": "the environment variable HF_HOME says where models are kept",
    "--hf-token": "the environment variable HF_TOKEN has the token",
    "--task": "use --set engine.model.task=VALUE",
    "--runner": "use --set engine.model.task=VALUE",
    "--convert": "use --set engine.model.task=VALUE",
    "--generation-config": "the model's own is used; sampling parameters of a request override it",
    "--override-generation-config": "sampling parameters of a request override the model's own",
    "-tp": "use --tensor-parallel-size N",
    "-pp": "use --pipeline-parallel-size N",
    "-dp": "use --data-parallel-size N",
    "-q": "use --quantization",
}
"""What the end of an error says of a flag. Flags that settings have the name of are found by ``settings.named``."""

_CHECKPOINTS_OWN = "a quantized checkpoint is recognized by its files: leave the flag out"
_VALUES: Mapping[tuple[str, str], str] = {
    ("--dtype", "fp16"): "fp16 is float16 here",
    ("--dtype", "bf16"): "bf16 is bfloat16 here",
    ("--dtype", "float"): "float is float32 here",
    ("--dtype", "fp32"): "fp32 is float32 here",
    ("--device", "gpu"): "GPUs are cuda here",
}


def of_value(flag: str, value: str) -> str:
    """Return the end of an error about a value that a flag does not have: what to write in its place, or nothing."""
    if flag == "--quantization":
        return f"; {_CHECKPOINTS_OWN}"
    hint = _VALUES.get((flag, value))
    return f"; {hint}" if hint else ""
