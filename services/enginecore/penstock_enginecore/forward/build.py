"""Construction of a model's forward pass: the fastest candidate whose results match the results of the model's own
modules.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from penstock_common.memory import in_units
from penstock_enginecore.attention.base import AttentionBackend
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.core.worker_stats import GraphStats
from penstock_enginecore.forward.backbone import Backbone, probe_specs, probe_states
from penstock_enginecore.forward.base import ForwardPass
from penstock_enginecore.forward.cuda.adapters import SlotModules, slot_modules
from penstock_enginecore.forward.cuda.attention import Attending, Recurrent, TritonAttention, attention_candidates
from penstock_enginecore.forward.cuda.decoder import FusedForward, device_launcher, fused_candidates
from penstock_enginecore.forward.cuda.graphs import StepGraphs
from penstock_enginecore.forward.cuda.library_attention import LibraryAttention
from penstock_enginecore.forward.cuda.library_check import AttentionLayers, open_library
from penstock_enginecore.forward.cuda.replayed_modules import ReplayedModules
from penstock_enginecore.forward.dummy_inputs import CUTS, NUM_TOKENS, Probe, probe_logits, probe_parts
from penstock_enginecore.forward.equivalence_check import Proven, first_proven
from penstock_enginecore.forward.latents import with_latents
from penstock_enginecore.forward.modules import ModulesForward, ProbedModel, in_cache_dtype, probe_model
from penstock_enginecore.forward.native import NativeForward, decoder_candidate, linear_candidate, pack_towers
from penstock_enginecore.forward.native_encoder import NativeEncoder, encoder_candidate, probe_texts
from penstock_enginecore.forward.stage import StageConfig, StageForward, cut
from penstock_enginecore.lora.device_slots import SlotLimits
from penstock_enginecore.models.dtypes import settle
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import LoadedModel, first_line
from penstock_enginecore.models.quantization.loading import dequantize_kept
from penstock_enginecore.native.backend import NativeBackend, open_backend
from penstock_enginecore.parallel.sharding import Part, SplitVocabulary
from penstock_enginecore.pooling.embedder import PoolingModel
from penstock_enginecore.sample.base import Sampler, TokenLauncher
from penstock_enginecore.sample.sampler import SamplingKernels, SplitSampler, TorchSampler
from penstock_enginecore.states.cuda.context import StateKernels

logger = logging.getLogger(__name__)

_REPLAYING = FusedForward | ReplayedModules


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """Settings for building a model's forward pass.

    Attributes:
        attention_backend: Name of the attention backend, or "auto".
        num_threads: Number of threads for CPU kernels.
        block_size: Number of tokens per KV cache block.
        cache_dtype: The dtype of the KV cache, or None for the model's dtype.
        part: This rank's shard of a model that is split among tensor-parallel ranks.
        int8: Whether the weights of linear layers were rounded to 8-bit integers.
        rounded: Whether CPU kernels may round inputs of matrix products to bfloat16.
        lora: Limits for LoRA adapters in a step, or None if adapters are disabled.
    """

    device: torch.device
    attention_backend: str
    kernels: KernelsConfig
    num_threads: int
    block_size: int
    cache_dtype: torch.dtype | None = None
    part: Part | None = None
    int8: bool = False
    rounded: bool = False
    lora: SlotLimits | None = None

    @property
    def vocabulary(self) -> SplitVocabulary | None:
        """Split of the logits among ranks, or None if the logits are not split."""
        return None if self.part is None else self.part.vocabulary

    def agree(self, ok: bool) -> bool:
        """Return whether ``ok`` is true on all tensor-parallel ranks of the model."""
        return ok if self.part is None else self.part.agree(ok)


@dataclass(frozen=True, slots=True)
class BuiltForward:
    """Forward pass and the sampler for its logits.

    Attributes:
        computing: Description of the implementation for the engine's log.
        launcher: Samples tokens on the device, or None if the device cannot sample.
        graphs: Function that returns statistics of replayed CUDA graphs, or None if no graphs are used. Thread-safe.
        vocabulary: Split of the logits among ranks, or None if each rank computes and samples complete logits.
        adapted_graphs: Whether steps with LoRA adapters also use CUDA graphs.
    """

    forward: ForwardPass
    sampler: Sampler
    computing: str
    launcher: TokenLauncher | None = None
    graphs: Callable[[], GraphStats] | None = None
    vocabulary: SplitVocabulary | None = None
    adapted_graphs: bool = False


@dataclass(frozen=True, slots=True)
class BuiltBackbone:
    """Layers of a pooling model. ``computing`` describes the implementation, for the engine's log."""

    backbone: Backbone
    computing: str


@torch.inference_mode()
def build_forward(model: LoadedModel, config: ForwardConfig) -> BuiltForward:
    """Build the forward pass and sampler of a generative model.

    Raises:
        ModelLoadError: The model cannot be served.
        ConfigError: A backend or kernel that the configuration names is not available.
        SpentError: A candidate was rejected after it had freed weights of the model's modules.
    """
    native, attends, backend = open_backends(config)
    probed = probe_model(model, config.device, config.block_size, config.cache_dtype)
    prompts = Probe.prompts(model.vocab_size, probed.demands)

    def run_prompt(forward: ForwardPass) -> torch.Tensor:
        return torch.cat([probe_logits(forward, prompt).clone() for prompt in prompts])

    probed = with_latents(probed, backend, lambda of: run_prompt(_reference(of)), config.agree)
    run = partial(run_prompt, _reference(probed))

    def run_parts(forward: ForwardPass) -> torch.Tensor:
        return torch.cat([probe_parts(forward, prompt, CUTS) for prompt in prompts])

    adapted = None if config.part else slot_modules(model.module, model.dtype, config.device, config.lora)

    def attended(attends: AttentionBackend, packed_bytes: int = 0) -> ForwardPass:
        return ModulesForward(
            probed, attends, packed_bytes, adapted, host_state_kernels=native.states() if native else None
        )

    serve = partial(attended, backend)

    def recurring(attends: AttentionBackend, kernels: StateKernels) -> ForwardPass:
        return ModulesForward(probed, attends, adapted=adapted, state_kernels=kernels)

    replay = None if config.part else partial(_replayed, probed, adapted)  # graphs cannot sum over ranks
    recurrent = Recurrent(probed.states, recurring, backend) if probed.states else None
    library = _library(config, probed)
    attending = Attending(config.device, probed.specs, model.dtype, attended, run_parts, replay, recurrent, library)
    # The fused decoder does not sum over tensor-parallel ranks, so it cannot compute one rank's shard of a model.
    whole = not config.part and not probed.states
    given = (config.kernels, config.attention_backend, config.lora, library)
    candidates = fused_candidates(probed, *given) if whole else []
    candidates += attention_candidates(attending, config.kernels, config.attention_backend)
    if native is not None and native.uses.decoder and attends and (native.uses.states or not probed.states):
        adapts = config.lora is not None
        candidates.append(decoder_candidate(native.library, probed, run_prompt, config.part, adapts=adapts))
    if native is not None and native.uses.linear:
        candidates.append(linear_candidate(native.library, model.module, run, serve))
    return finish_forward(model, config, native, attends, first_proven(candidates, run, config.agree), serve, library)


def finish_forward(
    model: LoadedModel,
    config: ForwardConfig,
    native: NativeBackend | None,
    attends: bool,
    proven: Proven[ForwardPass],
    serve: Callable[[], ForwardPass],
    library: LibraryAttention | None = None,
) -> BuiltForward:
    """Return the chosen forward pass of a generative model, and the sampler for its logits.

    Args:
        model: The model.
        config: Settings for the forward pass.
        native: The CPU kernels, or None.
        attends: Whether these kernels compute attention.
        proven: The candidate that serves, if any.
        serve: Function that creates the forward pass that serves if there is no such candidate.
        library: Library that computes attention of long prompts, or None.

    Raises:
        ModelLoadError: ``kernels.batch_invariant`` is true, but the forward pass is not batch invariant.
    """
    _settle(model.module)
    _check_invariant(model, config, proven)
    if not isinstance(proven.serves, FusedForward):  # the fused decoder uses the weights as they were loaded
        _dequantize(model)
        pack_towers(model.encoder, native)
    sampling = native.sampling() if native is not None else None
    computing = _describe(native, config, proven.name, attends and "attention", sampling and "sampler")
    launcher = _launcher(model, config, sampling, proven.serves)
    vocabulary = config.vocabulary if launcher is None else None  # the device can sample only from complete logits
    computing += _long_prompts(library, proven)
    if launcher is not None:
        computing += ", Triton sampler"
    if config.kernels.batch_invariant:
        computing += ", batch invariant"
    _log(computing, proven)
    forward = serve() if proven.serves is None else proven.serves
    graphs = forward.graph_stats if isinstance(forward, _REPLAYING) and forward.replays else None
    return BuiltForward(
        forward,
        _sampler(sampling, vocabulary),
        computing,
        launcher,
        graphs,
        vocabulary,
        adapted_graphs=graphs is not None and isinstance(forward, _REPLAYING) and forward.replays_adapters,
    )


def _reference(probed: ProbedModel) -> ModulesForward:
    """Return the forward pass with whose results the engine compares those of faster forward passes."""
    return ModulesForward(probed, create_backend("reference", probed.device), from_start=True)


@torch.inference_mode()
def build_stage(model: LoadedModel, config: ForwardConfig, stage: StageConfig) -> BuiltForward:
    """Build one pipeline stage of a generative model, open the links to the neighbouring stages, and free the layers of
    other stages. The model must be on the host.

    Raises the errors of ``build_forward``, and ModelLoadError for a model that cannot be split into stages.
    """
    native, attends, backend = open_backends(config)
    whole = probe_model(model, torch.device("cpu"), config.block_size, config.cache_dtype)
    left = cut(whole, stage).placed(config.device)
    left = replace(left, probed=with_latents(left.probed, backend, lambda of: left.run(_reference(of)), config.agree))

    def attended(attends: AttentionBackend, packed_bytes: int = 0) -> ForwardPass:
        return ModulesForward(
            left.probed, attends, packed_bytes, host_state_kernels=native.states() if native else None
        )

    serve = partial(attended, backend)

    library = _library(config, left.probed)
    attending = Attending(config.device, left.probed.specs, model.dtype, attended, left.run, library=library)
    candidates = attention_candidates(attending, config.kernels, config.attention_backend)
    if native is not None and native.uses.decoder and attends and not whole.states:
        adapts = config.lora is not None
        candidates.append(
            decoder_candidate(native.library, left.probed, left.run, config.part, left.seams, adapts=adapts)
        )
    if native is not None and native.uses.linear:
        candidates.append(linear_candidate(native.library, model.module, lambda: left.run(serve()), serve))
    proven = first_proven(candidates, lambda: left.expected, config.agree)
    _settle(model.module)
    sampling = native.sampling() if native is not None else None
    computing = _describe(native, config, proven.name, attends and "attention", sampling and "sampler")
    computing += _long_prompts(library, proven)
    computing += f", layers {left.own.start} to {left.own.stop - 1} of {left.num_layers}"
    _log(computing, proven)
    stage.links.open(
        max_tokens=max(stage.max_tokens, NUM_TOKENS),
        max_seqs=stage.max_seqs,
        width=left.width,
        dtype=left.dtype,
    )
    forward = StageForward(serve() if proven.serves is None else proven.serves, left.seams, stage.links)
    vocabulary = config.vocabulary if stage.links.is_last else None
    return BuiltForward(forward, _sampler(sampling, vocabulary), computing, vocabulary=vocabulary)


@torch.inference_mode()
def build_backbone(model: PoolingModel, config: ForwardConfig) -> BuiltBackbone:
    """Build the layers of a pooling model. Raises the errors of ``build_forward``."""
    native, attends, backend = open_backends(config)
    probed_specs = probe_specs(model, config.device, config.block_size)
    specs = replace(probed_specs, attention=in_cache_dtype(probed_specs.attention, config.cache_dtype))

    adapted = None if config.part else slot_modules(model.module, model.dtype, config.device, config.lora)

    def backbone(
        attends: AttentionBackend,
        packed_bytes: int = 0,
        state_kernels: StateKernels | None = None,
        *,
        from_start: bool = False,
        encoder: NativeEncoder | None = None,
    ) -> Backbone:
        of = (model, specs, attends, config.device, packed_bytes, config.cache_dtype, adapted, state_kernels)
        states = native.states() if native else None
        return Backbone(*of, from_start=from_start, host_state_kernels=states, encoder=encoder)

    def recurring(attends: AttentionBackend, kernels: StateKernels) -> Backbone:
        return backbone(attends, state_kernels=kernels)

    reference = backbone(create_backend("reference", config.device), from_start=True)

    def probed(of: Backbone) -> torch.Tensor:
        if model.is_encoder:
            return of.run(probe_texts(model))
        return probe_states(of, Probe.prompt(model.vocab_size))

    run, serve = partial(probed, reference), partial(backbone, backend)
    recurrent = Recurrent(specs.states, recurring, backend) if specs.states else None
    attending = Attending(config.device, specs.attention, model.dtype, backbone, probed, recurrent=recurrent)
    candidates = attention_candidates(attending, config.kernels, config.attention_backend)
    if native is not None and native.uses.encoder and model.is_encoder:

        def serve_encoder(encoder: NativeEncoder) -> Backbone:
            return backbone(backend, encoder.num_bytes, encoder=encoder)

        refused = "LoRA adapters are enabled" if config.lora is not None else None
        refused = "workers split the layers" if config.part is not None else refused
        candidates.append(encoder_candidate(native.library, model, specs, serve_encoder, refused))
    if native is not None and native.uses.linear:
        candidates.append(linear_candidate(native.library, model.module, run, serve))
    proven = first_proven(candidates, run, config.agree)
    _settle(*model.modules())
    pack_towers(model.encoder, native)
    computing = _describe(native, config, proven.name, attends and not model.is_encoder and "attention")
    _log(computing, proven)
    return BuiltBackbone(serve() if proven.serves is None else proven.serves, computing)


def _describe(native: NativeBackend | None, config: ForwardConfig, name: str | None, *parts: object) -> str:
    return (name or "torch") if native is None else native.describe(name, config.int8 and "int8 weights", *parts)


def _library(config: ForwardConfig, probed: ProbedModel) -> LibraryAttention | None:
    """Return the library for attention of long prompts, or None. Raises the errors of ``open_library``."""
    layers = AttentionLayers(probed.calls, config.device, probed.model.dtype, probed.cache_dtype)
    return None if config.attention_backend == "reference" else open_library(config.kernels, layers)


def _long_prompts(library: LibraryAttention | None, proven: Proven[ForwardPass]) -> str:
    """Return text about the attention of long prompts for the engine's log."""
    serves = proven.serves
    is_used = library is not None and serves is not None and any(spec.head_size_v for spec in serves.specs.values())
    return ", cuDNN attention for long prompts" if is_used else ""


def _replayed(
    probed: ProbedModel,
    adapted: SlotModules | None,
    attends: TritonAttention,
    graphs: StepGraphs,
    state_kernels: StateKernels | None,
) -> tuple[ForwardPass, Callable[[], str]]:
    """Return a forward pass that replays steps of the model's modules, and a function. The function returns the reason
    why the forward pass does not replay steps, or an empty text.
    """
    forward = ReplayedModules(probed, attends, graphs, adapted, state_kernels)
    return forward, lambda: forward.failure


def _launcher(
    model: LoadedModel, config: ForwardConfig, kernels: SamplingKernels | None, serves: ForwardPass | None
) -> TokenLauncher | None:
    """Return the sampler that runs on the device, or None if any rank has no such sampler. If ``serves`` replays steps,
    ``serves`` samples in these steps with the same kernels.
    """
    launcher = device_launcher(config.device, config.kernels, TorchSampler(kernels), model.vocab_size, model.dtype)
    if not config.agree(launcher is not None) or launcher is None:
        return None
    if isinstance(serves, _REPLAYING):
        serves.choose_by(launcher.for_steps)
    return launcher


def _sampler(kernels: SamplingKernels | None, vocabulary: SplitVocabulary | None) -> Sampler:
    sampler = TorchSampler(kernels)
    return sampler if vocabulary is None else SplitSampler(sampler, vocabulary)


def open_backends(config: ForwardConfig) -> tuple[NativeBackend | None, bool, AttentionBackend]:
    """Return the native CPU kernels or None, whether these kernels compute attention, and the attention backend."""
    native = open_backend(config.kernels, config.device, config.num_threads, rounded=config.rounded)
    if native is None or not native.uses.attention:
        return native, False, create_backend(config.attention_backend, config.device)
    backend = create_backend(config.attention_backend, config.device, native.attention)
    return native, config.attention_backend == "auto", backend


def _check_invariant(model: LoadedModel, config: ForwardConfig, proven: Proven[ForwardPass]) -> None:
    """Raise ModelLoadError if ``kernels.batch_invariant`` is true but the chosen forward pass is not a batch-invariant
    decoder.
    """
    serves, experts = proven.serves, ""
    if isinstance(serves, NativeForward) and not serves.is_batch_invariant:
        experts = "; PyTorch computes the model's experts"
    if not config.kernels.batch_invariant or (isinstance(serves, FusedForward | NativeForward) and not experts):
        return
    on_cpu = config.device.type == "cpu"
    decoder, page = ("the CPU kernels' decoder", "reference/models") if on_cpu else ("the fused decoder", "guides/gpu")
    raise ModelLoadError(
        f"kernels.batch_invariant is true, but only {decoder} is batch invariant, and it does not support "
        f"{type(model.module).__name__}{proven.reasons}{experts}; set kernels.batch_invariant to false, or serve a model that "
        f"docs/{page}.md lists for this decoder"
    )


def _settle(*modules: torch.nn.Module) -> None:
    """Convert 16-bit weights that no kernel uses to the compute dtype."""
    if num_bytes := sum(map(settle, modules)):
        logger.info(
            "converted the 16-bit weights without a native kernel to the compute dtype memory=%s",
            in_units(num_bytes),
        )


def _dequantize(model: LoadedModel) -> None:
    """Dequantize the weights of linear layers and experts that are still quantized, because only the fused decoder
    computes with quantized weights.

    Raises ModelLoadError if the dequantized weights do not fit into memory.
    """
    try:
        num_bytes = dequantize_kept(model.module, model.dtype)
    except torch.OutOfMemoryError as e:
        raise ModelLoadError(
            f"the fused decoder does not serve {type(model.module).__name__} with quantized weights, and the "
            f"weights do not fit when dequantized to {str(model.dtype).removeprefix('torch.')}: {first_line(e)}"
        ) from e
    if num_bytes:
        logger.warning(
            "dequantized the weights of linear layers and experts, because only the fused decoder computes with quantized "
            "weights, and the fused decoder is not used for this model memory=%s",
            in_units(num_bytes),
        )


def _log(computing: str, proven: Proven[object]) -> None:
    logger.log(logging.WARNING if proven.refuted else logging.INFO, "computing with %s%s", computing, proven.reasons)
