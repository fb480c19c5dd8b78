"""Properties of the loaded model that the engine core needs."""

import msgspec

from penstock_common.types.media import Modality
from penstock_enginecore.config.scheduler import STEP_TOKENS
from penstock_enginecore.core.pooling_validation import PoolingLimits
from penstock_enginecore.states.core.spec import StateNeeds


class MediaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one media modality."""

    modality: Modality
    num_blocks: int
    """Number of layers of the encoder. The cost of encoding an item is the item's number of embeddings times this
    number.
    """
    max_embeds: int
    """Number of embeddings of the largest media item."""
    max_tokens: int
    """Number of prompt positions of the largest media item, including tokens between its embeddings."""
    max_span: int = 0
    """Number of positions of the largest group of embeddings that attend to each other in the language model. One step
    must compute all embeddings of a group: an image, or a video frame. 0 if no embedding attends to later embeddings.
    """

    @property
    def attends_both_ways(self) -> bool:
        """Whether embeddings of an item attend to later embeddings."""
        return self.max_span > 0


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of the model that never change, not even if the weights are replaced. ``Executor.load_model`` returns
    this object.
    """

    max_len: int
    """Longest sequence that the model supports, in tokens. Device memory may limit sequences further."""
    vocab_size: int
    """Number of logits that the model computes per position. Token ids are less than this number."""
    eos_token_ids: frozenset[int] = frozenset()
    """Token ids that end a sequence if ``ignore_eos`` is false."""
    hidden_size: int = 0
    """Length of one prompt embedding, or 0 if the model accepts no prompt embeddings."""
    dtype: str = "float32"
    """Data type of the model's numbers: float32, bfloat16 or float16."""
    pooling: PoolingLimits | None = None
    """Pooling tasks and limits, or None if the model generates tokens."""
    runs_ahead: bool = False
    """Default of the setting ``scheduler.async_scheduling``: whether the engine prepares a step while earlier steps
    run.
    """
    step_tokens: int = STEP_TOKENS
    """Default of the setting ``scheduler.max_num_batched_tokens``, the maximum number of tokens in a step, if prompts
    may be split.
    """
    prompt_batch_tokens: int = 0
    """Default of the setting ``scheduler.max_prompt_batch_tokens``: the maximum total number of tokens of prompts that
    start in the same step. 0 means no limit.
    """
    supports_chunked_prefill: bool = True
    """Whether a prompt may be computed in several steps. False for encoders, because their tokens attend to later
    tokens.
    """
    media: tuple[MediaInfo, ...] = ()
    """Media modalities that the model accepts. Empty for text-only models."""
    embed_bytes: int = 0
    """Size in bytes of one row of the encoder cache. A row may have more elements than the model's hidden states."""
    sound_positions: int = 0
    """Number of positions at the start of each prompt that stand for a sound, if the model's decoder attends to the sound in
    separate layers, as in Whisper. 0 for all other models.
    """
    states: StateNeeds | None = None
    """Memory needs of recurrent layers, or None for a model without them."""
