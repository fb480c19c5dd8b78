"""Settings of the model: its checkpoint, media inputs and LoRA adapters."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields, model_name
from penstock_common.config.settings import ByteSize
from penstock_common.errors import ConfigError
from penstock_common.memory import host_memory
from penstock_common.types.media import MODALITIES

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float", "half"]
_DTYPES: Mapping[str, Dtype] = {"float": "float32", "half": "float16"}
"""Data types by their aliases, which are the same as in vLLM."""
Device = Literal["auto", "cpu", "cuda"]
Task = Literal["auto", "generate", "embed", "classify"]
LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["auto", "int8", "fp8"]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint, and options for computing the model."""

    path: Annotated[
        str, Meta(min_length=1, description="Directory of a Hugging Face checkpoint, or its id on the hub.")
    ]
    served_model_name: Annotated[
        str, Meta(description="Model name for clients. Empty: the last part of the path or id.")
    ] = ""
    revision: Annotated[str, Meta(description="Branch, tag or commit on the hub. Empty: the default branch.")] = ""
    dtype: Annotated[
        Dtype,
        Meta(
            description=(
                "Data type of weights and activations. auto: the checkpoint's type. float: float32. half: float16. The "
                "CPU kernels always compute in float32, also with 16-bit weights. If this setting is bfloat16 and not "
                "auto, matrix units may round activations to bfloat16. Without the kernels, a CPU computes in bfloat16 "
                "if it has bfloat16 instructions, and never in float16."
            )
        ),
    ] = "auto"
    quantization: Annotated[
        Quantization,
        Meta(
            description=(
                "Weight quantization. auto: as in the checkpoint. int8: on CPUs, round the weights of linear layers, "
                "except the output head, to 8-bit integers with one scale per row. fp8: on GPUs, round these weights "
                "and the weights of experts to 8-bit floats with one scale per row. Both halve the time to read these "
                "weights in decode steps of a few requests."
            )
        ),
    ] = "auto"
    load_format: Annotated[
        LoadFormat,
        Meta(
            description=(
                "Source of the weights. auto: the checkpoint's files. dummy: random weights, for a directory with "
                "only config.json and tokenizer. Use dummy to measure speed and memory without a download."
            )
        ),
    ] = "auto"
    device: Annotated[
        Device, Meta(description="Device of the model. auto: a GPU if there is one, otherwise the CPU.")
    ] = "auto"
    task: Annotated[
        Task,
        Meta(
            description=(
                "Task of the model. auto: from the checkpoint. Causal language models generate, models with a "
                "classification head classify, and encoders and sentence-transformers directories embed."
            )
        ),
    ] = "auto"
    max_model_len: (
        Annotated[
            int,
            Meta(
                ge=1,
                description=(
                    "Maximum tokens of a sequence, prompt and output together. Unset: the model's own limit, lowered "
                    "to the capacity of the KV cache."
                ),
            ),
        ]
        | None
    ) = None
    attention_backend: Annotated[
        str,
        Meta(
            description=(
                "Name of the attention backend: cpu, triton (for GPUs), reference, or a backend of a plugin. auto: the "
                "backend for the device."
            )
        ),
    ] = "auto"
    unused_weights: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "Name prefixes of checkpoint tensors that the model may ignore. A checkpoint with other unused "
                "tensors is refused."
            )
        ),
    ] = ()
    trust_remote_code: Annotated[bool, Meta(description="Run Python code that comes with the checkpoint.")] = False
    max_logprobs: Annotated[
        int,
        Meta(
            ge=-1,
            le=1_000_000,
            description=(
                "Maximum number of top log-probabilities per position that a request may ask for. -1: the whole "
                "vocabulary."
            ),
        ),
    ] = 20

    def __post_init__(self) -> None:
        check_fields("model", self)
        msgspec.structs.force_setattr(self, "dtype", _DTYPES.get(self.dtype, self.dtype))

    @property
    def name(self) -> str:
        """Name of the model that clients use in requests."""
        return model_name(self.path, self.served_model_name)


_DEFAULT_RECEIVER_CACHE = 1024 * 1024 * 1024
_PART_OF_MEMORY = 16


class MultimodalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images, audio and video in prompts, if the checkpoint has encoders for them."""

    enabled: Annotated[
        bool,
        Meta(
            description=(
                "Load the checkpoint's vision and audio encoders. false: load only the text model, which then accepts "
                "only text. Needed for models whose encoders are not supported."
            )
        ),
    ] = True
    encoder_cache_size: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Number of media embeddings to cache. Prompts with the same media share them. 0: twice "
                "scheduler.max_num_batched_tokens, but at least the embeddings of the largest item."
            ),
        ),
    ] = 0
    limit_per_prompt: Annotated[
        dict[str, Annotated[int, Meta(ge=0, le=10_000)]],
        Meta(
            description=(
                "Maximum number of items per prompt, by modality: image, audio, video. 0: the modality is refused. A "
                "modality without an entry is limited only by the prompt length."
            )
        ),
    ] = {}

    receiver_cache_bytes: (
        Annotated[
            ByteSize,
            Meta(
                ge=0,
                description=(
                    "Bytes of host memory for processed media, per frontend session. Frontends do not resend cached "
                    "media, and equal media of several frontends are stored once. 0: every request sends its own "
                    "media. Unset: 1 GiB, or a sixteenth of the machine's memory if that is less."
                ),
            ),
        ]
        | None
    ) = None
    shared_memory: Annotated[
        bool,
        Meta(
            description=(
                "Receive processed media and prompt embeddings from frontends on the same host through shared memory "
                "(/dev/shm)."
            )
        ),
    ] = True

    def __post_init__(self) -> None:
        check_fields("multimodal", self)
        if unknown := sorted(set(self.limit_per_prompt) - set(MODALITIES)):
            raise ConfigError(f"multimodal.limit_per_prompt has the key {unknown[0]!r}; known: {', '.join(MODALITIES)}")

    @property
    def receiver_cache_quota(self) -> int:
        """Maximum number of bytes of media that the engine caches for one session."""
        if self.receiver_cache_bytes is not None:
            return self.receiver_cache_bytes
        memory = host_memory()
        return (
            _DEFAULT_RECEIVER_CACHE if memory is None else min(_DEFAULT_RECEIVER_CACHE, memory.total // _PART_OF_MEMORY)
        )


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapters for requests."""

    max_loras: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description=(
                "Maximum number of different adapters among running requests. Requests without an adapter do not "
                "count. 0: requests with an adapter are refused. The flags --lora and --lora-directory of penstock "
                "serve set this to 8."
            ),
        ),
    ] = 0
    max_lora_rank: Annotated[int, Meta(ge=1, le=512, description="Maximum rank of an adapter.")] = 64
    cpu_memory: Annotated[
        ByteSize,
        Meta(
            ge=1024 * 1024,
            description=(
                "Bytes of host memory for adapters, per worker. The least recently used adapters are evicted first. "
                "Adapters of current requests and pinned adapters are not evicted."
            ),
        ),
    ] = 1024 * 1024 * 1024
    max_wait: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description=(
                "Maximum seconds that a request waits while other adapters use all max_loras slots. After this time, "
                "one of the other adapters starts no further requests, so that its slot becomes free."
            ),
        ),
    ] = 5.0

    def __post_init__(self) -> None:
        check_fields("lora", self)

    @property
    def enabled(self) -> bool:
        """Whether requests may use LoRA adapters."""
        return self.max_loras > 0
