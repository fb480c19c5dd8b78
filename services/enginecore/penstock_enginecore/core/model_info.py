"""What an engine knows of the model that its executor has loaded."""

import msgspec

from penstock_common.types.media import Modality
from penstock_enginecore.config.scheduler import STEP_TOKENS
from penstock_enginecore.core.pooling_validation import PoolingLimits


class MediaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a model takes of one modality."""

    modality: Modality
    num_blocks: int
    """Of its tower: computing an item costs its embeddings times these."""
    max_embeds: int
    """Embeddings of the largest item."""
    max_tokens: int
    """Positions of the largest item, tokens between its embeddings included."""
    attends_both_ways: bool = False
    """Whether the embeddings of an item see each other, wherever they stand in it. Then they are never computed apart."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The same from loading on, whatever is done to the weights afterwards. ``Executor.load_model`` returns it."""

    max_len: int
    """Longest sequence the model itself allows, in tokens, before that is fitted to any memory."""
    vocab_size: int
    """Rows of the model's output: token ids are below it."""
    eos_token_ids: frozenset[int] = frozenset()
    """Token ids that end a sequence unless ``ignore_eos``."""
    hidden_size: int = 0
    """Length of the vectors that may stand for prompt tokens; 0 where none are taken."""
    dtype: str = "float32"
    """What the model's numbers are: float32, bfloat16 or float16."""
    pooling: PoolingLimits | None = None
    """What the model is pooled for; None when it generates."""
    runs_ahead: bool = False
    """Whether steps are prepared while others run, where ``scheduler.async_scheduling`` does not say."""
    step_tokens: int = STEP_TOKENS
    """Tokens of a step, where ``scheduler.max_num_batched_tokens`` does not say and prompts may be split."""
    prompt_batch_tokens: int = 0
    """Of prompts that begin in a step together, where ``scheduler.max_prompt_batch_tokens`` does not say; 0: any number."""
    supports_chunked_prefill: bool = True
    """Whether a prompt may be computed in several steps; not so for encoders, whose tokens see those after them."""
    media: tuple[MediaInfo, ...] = ()
    """Modalities that the model takes; empty: it reads text alone."""
    embed_bytes: int = 0
    """Bytes of a row of the encoder cache, which may be wider than the model."""
