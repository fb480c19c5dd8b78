"""Reader of adapters in PEFT's format. If this engine cannot compute an adapter exactly as it was trained, the reader
refuses the adapter with a reason.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock_enginecore.lora.adapter import LoraAdapter, LowRankUpdate
from penstock_enginecore.lora.adapter_files import (
    DTYPES,
    TENSORS_FILE,
    AdapterFolder,
    FileState,
    ReadBefore,
    StoredTensor,
    StoredUpdate,
    TensorFile,
    TensorHeader,
    adapter_digest,
)
from penstock_enginecore.lora.errors import LoraError, LoraReason
from penstock_enginecore.lora.layer_patterns import ChosenLayer, choose_layers
from penstock_enginecore.lora.peft_format import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    PeftConfig,
    PeftTensors,
    is_update,
    parse_peft_config,
    sort_tensors,
    tensor_name,
)
from penstock_enginecore.lora.target import AdapterTarget

logger = logging.getLogger(__name__)

_LARGEST = torch.finfo(torch.float32).max
_LONGEST_NAME = 100
"""Maximum length of a model name in an error message, in characters."""
_OF_ANOTHER_MODEL = frozenset(
    {LoraReason.NO_TARGETS, LoraReason.MISSING_TENSOR, LoraReason.SURPLUS_TENSOR, LoraReason.SHAPE}
)
"""Reasons of errors that usually mean that the adapter belongs to another model."""


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """Limits for adapters. ``max_rank`` is the maximum rank of each layer's update."""

    max_rank: int


@torch.no_grad()
def read_adapter(
    path: Path | str, target: AdapterTarget, limits: LoraLimits, before: ReadBefore | None = None
) -> LoraAdapter:
    """Read the adapter in the directory ``path``. Raises LoraError if the adapter cannot be read or does not fit the
    model or the limits.

    Args:
        path: Directory of the adapter.
        limits: Limits for the adapter.
        target: The modules of the model that the adapter may update.
        before: Cache of adapters that were already read for the same target. For these adapters, the digest is not
            computed again, and the numbers are not checked again.
    """
    before = before or ReadBefore()
    with AdapterFolder.at(Path(path)) as folder:
        with folder.file(CONFIG_FILE) as (opened, _):
            config_state = FileState.of(opened)
            config = parse_peft_config(opened.read(MAX_CONFIG_BYTES + 1), limits.max_rank)
        with folder.file(TENSORS_FILE) as (opened, size):
            files = (config_state, FileState.of(opened))
            file = TensorFile(opened, TENSORS_FILE, size)
            tensors = sort_tensors(file.headers, target, TENSORS_FILE)
            try:
                layers = _layers(config, tensors, target)
                _check_headers(file.headers, layers, tensors, target, limits)
            except LoraError as e:
                raise _of_another_model(e, config, target) from None
            stored = file.read()
    _check_copies(tensors, stored, target)
    if _differs(config, target):
        logger.info(
            "LoRA adapter %s was trained on %s, but this engine serves %s", path, config.base_model, target.model
        )
    updates = [
        StoredUpdate(tensors.naming.in_model(layer), chosen.scale, *(stored[names[side]] for side in "AB"))
        for layer, chosen in layers.items()
        for names in (tensors.updates[layer],)
    ]
    known = before.digest(files)
    digest = known or adapter_digest(updates)
    # If the file also has copies of base weights, views of the file's buffer would keep these copies in memory.
    share = not tensors.copies
    ready = {
        update.module: _update(
            update, tensors.updates[tensors.naming.in_file(update.module)], share=share, good=known is not None
        )
        for update in updates
    }
    if known is None:
        before.remember(files, digest)
    return LoraAdapter(digest, ready)


def _differs(config: PeftConfig, target: AdapterTarget) -> bool:
    """Return whether the adapter's config names another base model. Both names may still refer to the same model."""
    return bool(config.base_model and target.model) and Path(config.base_model).name != Path(target.model).name


def _of_another_model(error: LoraError, config: PeftConfig, target: AdapterTarget) -> LoraError:
    """Return the error, with the name of the adapter's base model added if a wrong base model may be the cause."""
    if error.remedy or error.reason not in _OF_ANOTHER_MODEL or not _differs(config, target):
        return error
    base, model = config.base_model[:_LONGEST_NAME], Path(target.model).name
    remedy = f"the adapter was trained on {base!r}, and this model is {model!r}"
    return LoraError(error.reason, error.what, error.file, error.tensor, error.value, error.limit, remedy)


def adapter_bytes(path: Path | str, limits: LoraLimits) -> int:
    """Return the size of the adapter's matrices in memory, in bytes, from the file headers. Raises LoraError if the
    files cannot be read.
    """
    with AdapterFolder.at(Path(path)) as folder:
        with folder.file(CONFIG_FILE) as (opened, _):
            parse_peft_config(opened.read(MAX_CONFIG_BYTES + 1), limits.max_rank)
        with folder.file(TENSORS_FILE) as (opened, size):
            headers = TensorFile(opened, TENSORS_FILE, size).headers
    of_updates = (header for name, header in headers.items() if is_update(name))
    return sum(math.prod(header.shape) * torch.float32.itemsize for header in of_updates)


def _layers(config: PeftConfig, tensors: PeftTensors, target: AdapterTarget) -> dict[str, ChosenLayer]:
    """Return the linear layers that the adapter targets, by their names in the adapter's files. Raises LoraError if
    the adapter targets no layer, or a layer that cannot be adapted.
    """
    naming = tensors.naming
    known = {name: naming.in_file(name) for name in (*target.linears, *target.unserved)}
    linear = {known[name] for name in target.all_linear}
    layers = choose_layers(config, filter(None, known.values()), linear)
    for layer in layers:
        if why := target.unserved.get(naming.in_model(layer)):
            raise LoraError(why.reason, f"target_modules selects {layer}, which is {why.what}", CONFIG_FILE)
    if not layers:
        value = config.target_modules if isinstance(config.target_modules, str) else sorted(config.target_modules)[:8]
        raise LoraError(
            LoraReason.NO_TARGETS, "target_modules selects no layer of the model", CONFIG_FILE, value=repr(value)
        )
    return layers


def _check_headers(
    headers: Mapping[str, TensorHeader],
    layers: Mapping[str, ChosenLayer],
    tensors: PeftTensors,
    target: AdapterTarget,
    limits: LoraLimits,
) -> None:
    """Check that the file has exactly the configured tensors, with the right dtypes and shapes. Raises LoraError for
    any difference.
    """
    for layer, names in tensors.updates.items():
        if layer not in layers:
            raise _surplus(layer, next(iter(names.values())), tensors, target)
    for layer, chosen in layers.items():
        if chosen.rank > limits.max_rank:
            name, limit = tensor_name(layer, "A"), f"at most {limits.max_rank}: lora.max_lora_rank"
            raise LoraError(
                LoraReason.RANK,
                "the rank of the layer's update is too large",
                CONFIG_FILE,
                name,
                str(chosen.rank),
                limit,
            )
        features_out, features_in = target.linears[tensors.naming.in_model(layer)]
        for side, shape in (("A", (chosen.rank, features_in)), ("B", (features_out, chosen.rank))):
            held = tensors.updates.get(layer, {}).get(side)
            if held is None:
                raise LoraError(
                    LoraReason.MISSING_TENSOR,
                    "the tensor is missing",
                    TENSORS_FILE,
                    tensor_name(layer, side),
                    limit=f"must be {list(shape)}",
                )
            _check_header(held, headers[held], shape)
    for parameter, name in tensors.copies.items():
        _check_header(name, headers[name], target.samples[parameter].shape)


def _check_header(name: str, header: TensorHeader, shape: tuple[int, ...]) -> None:
    if header.dtype_name not in DTYPES:
        served = f"supported: {', '.join(DTYPES)}"
        raise LoraError(
            LoraReason.DTYPE, "the tensor's dtype is not supported", TENSORS_FILE, name, header.dtype_name, served
        )
    if header.shape != shape:
        raise LoraError(
            LoraReason.SHAPE,
            "the tensor's shape is wrong",
            TENSORS_FILE,
            name,
            str(list(header.shape)),
            f"must be {list(shape)}",
        )


def _surplus(layer: str, name: str, tensors: PeftTensors, target: AdapterTarget) -> LoraError:
    """Return the error for an unexpected tensor ``name``."""
    known = tensors.naming.in_model(layer)
    if known in target.linears:
        what = f"target_modules in {CONFIG_FILE} does not select the tensor's layer"
        return LoraError(LoraReason.SURPLUS_TENSOR, what, TENSORS_FILE, name)
    if why := target.unserved.get(known):
        return LoraError(why.reason, f"the tensor's layer is {why.what}", TENSORS_FILE, name)
    if tensors.naming.of_media and not known:
        what = "the tensor belongs to the part of the model that reads media, which does not support adapters"
        remedy = "train only the text model, with exclude_modules or an expression for target_modules"
        return LoraError(LoraReason.MODULE, what, TENSORS_FILE, name, remedy=remedy)
    if ".experts." in f".{layer}.":
        return LoraError(
            LoraReason.EXPERTS, "the tensor belongs to experts, which do not support adapters", TENSORS_FILE, name
        )
    return LoraError(LoraReason.SURPLUS_TENSOR, "the model has no such layer", TENSORS_FILE, name)


def _check_copies(tensors: PeftTensors, stored: Mapping[str, StoredTensor], target: AdapterTarget) -> None:
    """Check that weights of the base model in the adapter's file equal this model's weights. PEFT saves the base
    model's lm_head together with an adapter for the lm_head.
    """
    for parameter, name in tensors.copies.items():
        if not target.samples[parameter].agrees(stored[name].float()):
            raise LoraError(
                LoraReason.BASE_WEIGHT,
                f"the tensor differs from the base model's {parameter}",
                TENSORS_FILE,
                name,
                remedy="the adapter was probably trained on another model; if not, save it with save_embedding_layers=False",
            )


def _update(update: StoredUpdate, names: Mapping[str, str], *, share: bool, good: bool) -> LowRankUpdate:
    """Return an update whose B includes the scale.

    Args:
        update: The update, with the matrices as stored in the file.
        names: Tensor names by side, for error messages.
        share: Whether the result may share memory with the buffer of the file.
        good: Whether an earlier check has shown that all numbers are finite.
    """
    a, b = update.a.float(), update.b.float()
    if not good:
        _check_finite(a, names["A"], 1.0)
        _check_finite(b, names["B"], update.scale)
    if not share:
        return LowRankUpdate(a.clone(), b * update.scale)
    return LowRankUpdate(a, b if update.scale == 1.0 else b.mul_(update.scale))


def _check_finite(tensor: torch.Tensor, name: str, scale: float) -> None:
    """Raise LoraError if the tensor has numbers that are not finite, before or after scaling."""
    low, high = (float(bound) for bound in tensor.aminmax())
    if max(abs(low), abs(high)) * abs(scale) <= _LARGEST:
        return
    at = (~(tensor * scale).isfinite()).nonzero()[0].tolist()
    times = "" if scale == 1.0 else f" times {scale:g}"
    value = f"{float(tensor[tuple(at)])}{times} at {at}"
    raise LoraError(LoraReason.NOT_FINITE, "the tensor has numbers that are not finite", TENSORS_FILE, name, value)
