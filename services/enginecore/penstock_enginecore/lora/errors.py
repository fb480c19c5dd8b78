"""Errors and reasons for refusing an adapter. This module can be imported without torch."""

from enum import StrEnum

from penstock_common.errors import PenstockError


class LoraReason(StrEnum):
    """Machine-readable reason for refusing an adapter."""

    NOT_FOUND = "NOT_FOUND"
    """The path does not exist, or a file is missing."""
    UNREADABLE = "UNREADABLE"
    """The operating system refuses to read a file, or the file changed while it was read."""
    CONFIG = "CONFIG"
    """adapter_config.json is too large, is not JSON, or has a missing or mistyped setting."""
    PICKLE = "PICKLE"
    """The tensors are pickled, and pickles may run code."""
    TENSOR_FILE = "TENSOR_FILE"
    """The tensor file is truncated or malformed."""
    PEFT_TYPE = "PEFT_TYPE"
    """The adapter is not a LoRA adapter."""
    TASK_TYPE = "TASK_TYPE"
    """The adapter has a task type that is not supported."""
    DORA = "DORA"
    MODULES_TO_SAVE = "MODULES_TO_SAVE"
    """The adapter contains complete layers, not only low-rank updates."""
    BIAS = "BIAS"
    """The adapter contains trained biases of the base model."""
    LORA_BIAS = "LORA_BIAS"
    EMBEDDING = "EMBEDDING"
    """The adapter changes or replaces embeddings."""
    BASE_WEIGHT = "BASE_WEIGHT"
    """The adapter contains a copy of a base model weight that differs from this model's weight."""
    FAN_IN_FAN_OUT = "FAN_IN_FAN_OUT"
    """The adapter's layers store transposed weights."""
    CONV1D = "CONV1D"
    """The adapter changes Conv1D layers, as in GPT-2. Conv1D layers are not linear layers."""
    EXPERTS = "EXPERTS"
    """The adapter changes experts, or other layers of a mixture-of-experts block, such as routers."""
    MODULE = "MODULE"
    """The adapter changes layers of an unsupported kind."""
    TARGET_PARAMETERS = "TARGET_PARAMETERS"
    LAYER_REPLICATION = "LAYER_REPLICATION"
    TRAINABLE_TOKENS = "TRAINABLE_TOKENS"
    CHANGED_BASE = "CHANGED_BASE"
    """The adapter's initialization changed the base model's weights before training."""
    SETTING = "SETTING"
    """An unsupported setting is set."""
    RANK = "RANK"
    """A rank is above the limit."""
    NO_TARGETS = "NO_TARGETS"
    """The adapter's settings select no layer of the model."""
    MISSING_TENSOR = "MISSING_TENSOR"
    SURPLUS_TENSOR = "SURPLUS_TENSOR"
    SHAPE = "SHAPE"
    DTYPE = "DTYPE"
    NOT_FINITE = "NOT_FINITE"
    """A number is NaN or infinite, or becomes NaN or infinite when it is scaled."""


class LoraError(PenstockError):
    """Raised for an adapter that cannot be served. The message contains all attributes.

    Attributes:
        file: Name of the file in the adapter's directory. If there is no such file, the path of the directory.
        tensor: Name of the tensor, or empty.
        value: The value that was found, or empty.
        limit: The values that are allowed, or empty.
        remedy: What the user can do, or empty.
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
        super().__init__(reason, what, file, tensor, value, limit, remedy)  # Pickling needs all arguments in ``args``.
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
