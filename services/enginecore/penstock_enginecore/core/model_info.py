"""Facts about the loaded model that the engine core needs."""

import msgspec

from penstock_common.types.media import Modality
from penstock_enginecore.config.scheduler import STEP_TOKENS
from penstock_enginecore.core.pooling_validation import PoolingLimits
from penstock_enginecore.states.core.spec import StateNeeds


class MediaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one media modality."""

    modality: Modality
    num_blocks: int
    """Number of layers of the encoder. Computing an item costs its embeddings times this number."""
    max_embeds: int
    """Number of embeddings of the largest item."""
    max_tokens: int
    """Number of positions of the largest item, including tokens between its embeddings."""
    attends_both_ways: bool = False
    """Whether all embeddings of an item attend to each other. If so, they are always computed in one step."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Constant facts about the model, independent of later changes to its weights. ``Executor.load_model`` returns
    them.
    """

    max_len: int
    """Longest sequence that the model allows, in tokens, before it is limited by memory."""
    vocab_size: int
    """Number of rows of the model's output. Token ids are less than this."""
    eos_token_ids: frozenset[int] = frozenset()
    """Token ids that end a sequence unless ``ignore_eos``."""
    hidden_size: int = 0
    """Length of prompt embeddings, or 0 if the model accepts none."""
    dtype: str = "float32"
    """Data type of the model's numbers: float32, bfloat16 or float16."""
    pooling: PoolingLimits | None = None
    """Pooling limits, or None if the model generates."""
    runs_ahead: bool = False
    """Default of ``scheduler.async_scheduling``: whether steps are prepared while others run."""
    step_tokens: int = STEP_TOKENS
    """Default of ``scheduler.max_num_batched_tokens`` if prompts may be split: tokens of a step."""
    prompt_batch_tokens: int = 0
    """Default of ``scheduler.max_prompt_batch_tokens``: tokens of prompts that begin in the same step. 0: unlimited."""
    supports_chunked_prefill: bool = True
    """Whether a prompt may be computed in several steps. False for encoders, whose tokens attend to later ones."""
    media: tuple[MediaInfo, ...] = ()
    """Modalities that the model accepts. Empty for text-only models."""
    embed_bytes: int = 0
    """Bytes of one row of the encoder cache, which may be wider than the model."""
    states: StateNeeds | None = None
    """Memory needs of recurrent layers, or None for a model without them."""
