"""Which checkpoint is served, with its media inputs and LoRA adapters, and how it is computed."""

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
"""Other names of types, as vLLM has them."""
Device = Literal["auto", "cpu", "cuda"]
Task = Literal["auto", "generate", "embed", "classify"]
LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["auto", "int8"]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which checkpoint is served, and how it is computed."""

    path: Annotated[
        str, Meta(min_length=1, description="Directory of a Hugging Face checkpoint, or its id on the hub.")
    ]
    served_model_name: Annotated[
        str, Meta(description="Name that clients use; empty: the last part of the path or id.")
    ] = ""
    revision: Annotated[str, Meta(description="Branch, tag or commit on the hub; empty: the default branch.")] = ""
    dtype: Annotated[
        Dtype,
        Meta(
            description="Type of weights and activations; auto: the checkpoint's own; float: float32; half: float16. The kernels "
            "for CPUs compute all in float32, by weights of 16 bits, too, and bfloat16, asked for by name, lets matrix units "
            "round activations. Without kernels a CPU computes bfloat16 where it has instructions for it, and float16 never."
        ),
    ] = "auto"
    quantization: Annotated[
        Quantization,
        Meta(
            description="How weights are kept; auto: as the checkpoint has them. int8: on CPUs those of linear layers, but the "
            "head, are rounded to 8-bit integers and a scale per row, which decode steps of a few requests read in half the time."
        ),
    ] = "auto"
    load_format: Annotated[
        LoadFormat,
        Meta(
            description="Where weights come from; auto: the checkpoint's files. dummy: random ones, for a directory with "
            "config.json and tokenizer alone: to measure speed and memory without a download."
        ),
    ] = "auto"
    device: Annotated[Device, Meta(description="Where the model runs; auto: on a GPU where there is one.")] = "auto"
    task: Annotated[
        Task,
        Meta(
            description="What the model is served for; auto follows the checkpoint: causal language models generate, those with "
            "a classification head classify, encoders and sentence-transformers directories embed."
        ),
    ] = "auto"
    max_model_len: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="Tokens of the longest sequence, prompt and output; unset: the model's own limit, lowered to "
                "what the KV cache can hold.",
            ),
        ]
        | None
    ) = None
    attention_backend: Annotated[
        str,
        Meta(
            description="Name of the attention backend: cpu, triton (on GPUs), reference, or one of a plugin; auto picks one for "
            "the device."
        ),
    ] = "auto"
    unused_weights: Annotated[
        tuple[str, ...],
        Meta(
            description="Beginnings of the names of tensors in the checkpoint that the model does not need. A checkpoint with "
            "other tensors that the model does not use is refused."
        ),
    ] = ()
    trust_remote_code: Annotated[bool, Meta(description="Run Python code that comes with the checkpoint.")] = False
    max_logprobs: Annotated[
        int,
        Meta(
            ge=-1,
            le=1_000_000,
            description="Likeliest tokens that a request may have reported per position; -1: the whole vocabulary.",
        ),
    ] = 20

    def __post_init__(self) -> None:
        check_fields("model", self)
        msgspec.structs.force_setattr(self, "dtype", _DTYPES.get(self.dtype, self.dtype))

    @property
    def name(self) -> str:
        """The name clients use."""
        return model_name(self.path, self.served_model_name)


_DEFAULT_RECEIVER_CACHE = 1024 * 1024 * 1024
_PART_OF_MEMORY = 16


class MultimodalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images, sound and video in prompts, where the checkpoint has towers for them."""

    enabled: Annotated[
        bool, Meta(description="Load the checkpoint's towers. If not, the text model alone is loaded, and serves text.")
    ] = True
    encoder_cache_size: Annotated[
        int,
        Meta(
            ge=0,
            description="Embeddings that are kept of images, sound and video, and shared by prompts with the same ones. 0: twice "
            "scheduler.max_num_batched_tokens, and the largest item at least.",
        ),
    ] = 0
    limit_per_prompt: Annotated[
        dict[str, Annotated[int, Meta(ge=0, le=10_000)]],
        Meta(
            description="Items of a prompt at most, by modality: image, audio, video. 0: none are taken. What is not named here "
            "is limited by the length of prompts alone."
        ),
    ] = {}

    receiver_cache_bytes: (
        Annotated[
            ByteSize,
            Meta(
                ge=0,
                description="Bytes of host memory for processed media, of each frontend's session: what comes again is not sent "
                "again, and what several frontends send is there once. 0: each request brings its own. Unset: 1 GiB, or a "
                "sixteenth of the machine's memory where that is less.",
            ),
        ]
        | None
    ) = None
    shared_memory: Annotated[
        bool,
        Meta(
            description="Take processed media, and prompts as vectors, from frontends of the same host through shared memory "
            "(/dev/shm)."
        ),
    ] = True

    def __post_init__(self) -> None:
        check_fields("multimodal", self)
        if unknown := sorted(set(self.limit_per_prompt) - set(MODALITIES)):
            raise ConfigError(
                f"multimodal.limit_per_prompt names {unknown[0]!r}, which is none of {', '.join(MODALITIES)}"
            )

    @property
    def receiver_cache_quota(self) -> int:
        """Bytes that a session may have kept."""
        if self.receiver_cache_bytes is not None:
            return self.receiver_cache_bytes
        memory = host_memory()
        return (
            _DEFAULT_RECEIVER_CACHE if memory is None else min(_DEFAULT_RECEIVER_CACHE, memory.total // _PART_OF_MEMORY)
        )


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapters that requests may name."""

    max_loras: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="Adapters among requests that run at once; requests without one do not count. 0: requests with an "
            "adapter are refused.",
        ),
    ] = 0
    max_lora_rank: Annotated[int, Meta(ge=1, le=512, description="Largest rank of an adapter that is served.")] = 64
    cpu_memory: Annotated[
        ByteSize,
        Meta(
            ge=1024 * 1024,
            description="Bytes of host memory for adapters, of each worker. Those used least recently make room for others; "
            "those that requests have, and pinned ones, stay.",
        ),
    ] = 1024 * 1024 * 1024
    max_wait: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="Seconds that a request waits at most while others keep max_loras adapters busy, before one of these "
            "admits no more and makes room for it.",
        ),
    ] = 5.0

    def __post_init__(self) -> None:
        check_fields("lora", self)

    @property
    def enabled(self) -> bool:
        """Whether requests may have adapters."""
        return self.max_loras > 0
