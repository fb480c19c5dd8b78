"""Why an adapter cannot be served. Importable without torch."""

from enum import StrEnum

from penstock_common.errors import PenstockError


class LoraReason(StrEnum):
    """What is wrong with an adapter, for programs."""

    NOT_FOUND = "NOT_FOUND"
    """There is nothing at the path, or a file is missing."""
    UNREADABLE = "UNREADABLE"
    """The system refuses to read a file, or it changed meanwhile."""
    CONFIG = "CONFIG"
    """adapter_config.json is too large, is no JSON, or lacks or mistypes a setting."""
    PICKLE = "PICKLE"
    """The tensors are pickled; those may run code."""
    TENSOR_FILE = "TENSOR_FILE"
    """The tensors' file is cut off or garbled."""
    PEFT_TYPE = "PEFT_TYPE"
    """It is no LoRA."""
    TASK_TYPE = "TASK_TYPE"
    """It is made for models of a kind that is not served."""
    DORA = "DORA"
    MODULES_TO_SAVE = "MODULES_TO_SAVE"
    """It brings whole layers along."""
    BIAS = "BIAS"
    """Biases of the base model were trained."""
    LORA_BIAS = "LORA_BIAS"
    EMBEDDING = "EMBEDDING"
    """It adapts or replaces embeddings."""
    BASE_WEIGHT = "BASE_WEIGHT"
    """It brings a weight of the base model along that is not that of this one."""
    FAN_IN_FAN_OUT = "FAN_IN_FAN_OUT"
    """Its layers have their weights the other way round."""
    CONV1D = "CONV1D"
    """It adapts GPT-2's layers, which are no linear layers."""
    EXPERTS = "EXPERTS"
    """It adapts experts or what lies beside them, such as routers."""
    MODULE = "MODULE"
    """It adapts layers of another kind."""
    TARGET_PARAMETERS = "TARGET_PARAMETERS"
    LAYER_REPLICATION = "LAYER_REPLICATION"
    TRAINABLE_TOKENS = "TRAINABLE_TOKENS"
    CHANGED_BASE = "CHANGED_BASE"
    """It was trained on weights that its initialization had changed."""
    SETTING = "SETTING"
    """A setting that is not honoured has a value."""
    RANK = "RANK"
    """A rank is above the limit."""
    NO_TARGETS = "NO_TARGETS"
    """It names no layer of the model."""
    MISSING_TENSOR = "MISSING_TENSOR"
    SURPLUS_TENSOR = "SURPLUS_TENSOR"
    SHAPE = "SHAPE"
    DTYPE = "DTYPE"
    NOT_FINITE = "NOT_FINITE"
    """A number is NaN or infinite, or becomes so when it is scaled."""


class LoraError(PenstockError):
    """An adapter cannot be served. ``file``: its name in the adapter's directory, or the path where there is none. ``tensor``,
    ``value`` and ``limit``: what was found where, and what may be there; empty where there is no such thing. ``remedy``: what to
    do. Text names all of them.
    """

    def __init__(
        self,
        reason: LoraReason,
        what: str,
        file: str = "",
        tensor: str = "",
        value: str = "",
        limit: str = "",
        remedy: str = "",
    ) -> None:
        super().__init__(reason, what, file, tensor, value, limit, remedy)  # all of them, or it could not be pickled
        self.reason = reason
        self.what = what
        self.file = file
        self.tensor = tensor
        self.value = value
        self.limit = limit
        self.remedy = remedy

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.file, self.tensor and f"tensor {self.tensor}") if part)
        found = f": {self.value}" if self.value else ""
        limit = f" ({self.limit})" if self.limit else ""
        return f"{where}{where and ': '}{self.what}{found}{limit}{self.remedy and '; '}{self.remedy}"
