"""Builds what runs a loaded model: the fastest that is proved to compute what the model's own modules do."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
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
from penstock_enginecore.forward.cuda.attention import Attending, TritonAttention, attention_candidates
from penstock_enginecore.forward.cuda.decoder import FusedForward, device_launcher, fused_candidates
from penstock_enginecore.forward.cuda.graphs import StepGraphs
from penstock_enginecore.forward.cuda.replayed_modules import ReplayedModules
from penstock_enginecore.forward.dummy_inputs import CUTS, NUM_TOKENS, Probe, probe_logits, probe_parts
from penstock_enginecore.forward.equivalence_check import Proven, first_proven
from penstock_enginecore.forward.modules import ModulesForward, ProbedModel, in_cache_dtype, probe_model
from penstock_enginecore.forward.native import NativeForward, decoder_candidate, linear_candidate, pack_towers
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

logger = logging.getLogger(__name__)

_REPLAYING = FusedForward | ReplayedModules


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """What a model is to be run with. ``num_threads``: those of kernels. ``block_size``: tokens of a block of the KV cache.
    ``cache_dtype``: of the numbers in it, None for that of the model. ``part``: what a rank that shares the model has of it.
    ``int8``: linear layers' weights were rounded to integers. ``rounded``: CPUs may round inputs of products to bfloat16.
    ``lora``: what steps may have of adapters, None for none.
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
        """Of logits that may be left in parts."""
        return None if self.part is None else self.part.vocabulary

    def agree(self, ok: bool) -> bool:
        """Whether it is so on all ranks that share the model."""
        return ok if self.part is None else self.part.agree(ok)


@dataclass(frozen=True, slots=True)
class BuiltForward:
    """A forward pass and the sampler of its logits. ``computing``: what computes, for operators. ``launcher``: has the device
    choose tokens, where it can. ``graphs``: of the steps that are replayed, None where none are; any thread may ask.
    ``vocabulary``: of logits that the pass leaves in parts where it is asked to, and the sampler takes so. ``batch_invariant``:
    logits are, tokens are to be. ``adapted_graphs``: steps with adapters are replayed, too.
    """

    forward: ForwardPass
    sampler: Sampler
    computing: str
    launcher: TokenLauncher | None = None
    graphs: Callable[[], GraphStats] | None = None
    vocabulary: SplitVocabulary | None = None
    batch_invariant: bool = False
    adapted_graphs: bool = False


@dataclass(frozen=True, slots=True)
class BuiltBackbone:
    """A model's layers. ``computing``: what computes, for operators."""

    backbone: Backbone
    computing: str


@torch.inference_mode()
def build_forward(model: LoadedModel, config: ForwardConfig) -> BuiltForward:
    """What runs a model that generates. Raises ModelLoadError for a model that cannot be served, ConfigError for a backend or
    kernels that cannot be had, and SpentError.
    """
    native, attends, backend = open_backends(config)
    probed = probe_model(model, config.device, config.block_size, config.cache_dtype)
    reference = ModulesForward(probed, create_backend("reference", config.device))

    prompts = Probe.prompts(model.vocab_size, probed.demands)

    def run_prompt(forward: ForwardPass) -> torch.Tensor:
        return torch.cat([probe_logits(forward, prompt).clone() for prompt in prompts])

    run = partial(run_prompt, reference)

    def run_parts(forward: ForwardPass) -> torch.Tensor:
        return torch.cat([probe_parts(forward, prompt, CUTS) for prompt in prompts])

    adapted = None if config.part else slot_modules(model.module, model.dtype, config.device, config.lora)

    def attended(attends: AttentionBackend, packed_bytes: int = 0) -> ForwardPass:
        return ModulesForward(probed, attends, packed_bytes, adapted)

    serve = partial(attended, backend)

    # What ranks exchange is not captured.
    replay = None if config.part else partial(_replayed, probed, adapted)
    attending = Attending(config.device, probed.specs, model.dtype, attended, run_parts, replay)
    # The fused decoder sums nothing up.
    candidates = [] if config.part else fused_candidates(probed, config.kernels, config.attention_backend, config.lora)
    candidates += attention_candidates(attending, config.kernels, config.attention_backend)
    if native is not None and native.uses.decoder and attends:
        candidates.append(decoder_candidate(native.library, probed, run_prompt, config.part))
    if native is not None and native.uses.linear:
        candidates.append(linear_candidate(native.library, model.module, run, serve))
    proven = first_proven(candidates, run, config.agree)
    _settle(model.module)
    _check_invariant(model, config, proven)
    if not isinstance(proven.serves, FusedForward):  # beside which weights stay as they are read
        _dequantize(model)
        pack_towers(model.encoder, native)
    sampling = native.sampling() if native is not None else None
    computing = _describe(native, config, proven.name, attends and "attention", sampling and "sampler")
    launcher = _launcher(model, config, sampling, proven.serves)
    vocabulary = config.vocabulary if launcher is None else None  # a device chooses from all logits
    if launcher is not None:
        computing += ", Triton sampler"
    if config.kernels.batch_invariant:
        computing += ", batch invariant"
    _log(computing, proven)
    forward = serve() if proven.serves is None else proven.serves
    graphs = forward.graph_stats if isinstance(forward, _REPLAYING) and forward.replays else None
    invariant = config.kernels.batch_invariant
    return BuiltForward(
        forward,
        _sampler(sampling, vocabulary),
        computing,
        launcher,
        graphs,
        vocabulary,
        invariant,
        adapted_graphs=graphs is not None and isinstance(forward, _REPLAYING) and forward.replays_adapters,
    )


@torch.inference_mode()
def build_stage(model: LoadedModel, config: ForwardConfig, stage: StageConfig) -> BuiltForward:
    """What runs one stage of a model that generates, with its links open; the other layers are freed. The model is on the host.
    Raises as ``build_forward`` does, and ModelLoadError for a model that is not served in stages.
    """
    native, attends, backend = open_backends(config)
    whole = probe_model(model, torch.device("cpu"), config.block_size, config.cache_dtype)
    left = cut(whole, stage).placed(config.device)

    def attended(attends: AttentionBackend, packed_bytes: int = 0) -> ForwardPass:
        return ModulesForward(left.probed, attends, packed_bytes)

    serve = partial(attended, backend)

    attending = Attending(config.device, left.probed.specs, model.dtype, attended, left.run)
    candidates = attention_candidates(attending, config.kernels, config.attention_backend)
    if native is not None and native.uses.decoder and attends:
        candidates.append(decoder_candidate(native.library, left.probed, left.run, config.part, left.seams))
    if native is not None and native.uses.linear:
        candidates.append(linear_candidate(native.library, model.module, lambda: left.run(serve()), serve))
    proven = first_proven(candidates, lambda: left.expected, config.agree)
    _settle(model.module)
    sampling = native.sampling() if native is not None else None
    computing = _describe(native, config, proven.name, attends and "attention", sampling and "sampler")
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
    """What runs the layers of a model that is pooled. Raises as ``build_forward`` does."""
    native, attends, backend = open_backends(config)
    specs = in_cache_dtype(probe_specs(model, config.device, config.block_size), config.cache_dtype)

    adapted = None if config.part else slot_modules(model.module, model.dtype, config.device, config.lora)

    def backbone(attends: AttentionBackend, packed_bytes: int = 0) -> Backbone:
        return Backbone(model, specs, attends, config.device, packed_bytes, config.cache_dtype, adapted)

    reference = backbone(create_backend("reference", config.device))

    probed = partial(probe_states, probe=Probe.prompt(model.vocab_size))
    run, serve = partial(probed, reference), partial(backbone, backend)
    attending = Attending(config.device, specs, model.dtype, backbone, probed)
    candidates = attention_candidates(attending, config.kernels, config.attention_backend)
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


def _replayed(
    probed: ProbedModel, adapted: SlotModules | None, attends: TritonAttention, graphs: StepGraphs
) -> tuple[ForwardPass, Callable[[], str]]:
    """The modules, steps of which are replayed, and what tells why they are not."""
    forward = ReplayedModules(probed, attends, graphs, adapted)
    return forward, lambda: forward.failure


def _launcher(
    model: LoadedModel, config: ForwardConfig, kernels: SamplingKernels | None, serves: ForwardPass | None
) -> TokenLauncher | None:
    """What chooses tokens on the device, where it does on those of all ranks. What ``serves`` may do it by the same kernels."""
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
    """The kernels, whether they attend, and what attends."""
    native = open_backend(config.kernels, config.device, config.num_threads, rounded=config.rounded)
    if native is None or not native.uses.attention:
        return native, False, create_backend(config.attention_backend, config.device)
    backend = create_backend(config.attention_backend, config.device, native.attention)
    return native, config.attention_backend == "auto", backend


def _check_invariant(model: LoadedModel, config: ForwardConfig, proven: Proven[ForwardPass]) -> None:
    """Raise ModelLoadError where ``kernels.batch_invariant`` is asked for and no decoder of ours serves."""
    if not config.kernels.batch_invariant or isinstance(proven.serves, FusedForward | NativeForward):
        return
    on_cpu = config.device.type == "cpu"
    decoder, page = ("the CPU kernels' decoder", "models") if on_cpu else ("the fused decoder", "gpu")
    raise ModelLoadError(
        f"kernels.batch_invariant is true, and {decoder}, which alone keeps to it, does not compute "
        f"{type(model.module).__name__}{proven.reasons}; set it to false, or serve a model that docs/{page}.md names for it"
    )


def _settle(*modules: torch.nn.Module) -> None:
    """Widen what is stored in 16 bits and nobody has taken over."""
    if num_bytes := sum(map(settle, modules)):
        logger.info("weights that the kernels do not multiply with are widened: they take %s", in_units(num_bytes))


def _dequantize(model: LoadedModel) -> None:
    """Linear layers and experts that keep quantized weights for a decoder that does not serve. Raises ModelLoadError."""
    try:
        num_bytes = dequantize_kept(model.module, model.dtype)
    except torch.OutOfMemoryError as e:
        raise ModelLoadError(
            f"the fused decoder does not serve {type(model.module).__name__} with quantized weights, and dequantized to "
            f"{str(model.dtype).removeprefix('torch.')} they do not fit: {first_line(e)}"
        ) from e
    if num_bytes:
        logger.warning("linear layers and experts are dequantized: their weights take %s", in_units(num_bytes))


def _log(computing: str, proven: Proven[object]) -> None:
    logger.log(logging.WARNING if proven.refuted else logging.INFO, "computing with %s%s", computing, proven.reasons)
