"""How many embeddings of media an engine keeps."""

from penstock_enginecore.core.model_info import ModelInfo


def encoder_cache_size(configured: int, step_tokens: int, model: ModelInfo) -> int:
    """As ``multimodal.encoder_cache_size`` says, and the largest item at least; 0 configured: twice the tokens of a step. 0 for a
    model that takes no media.
    """
    if not model.media:
        return 0
    return max(configured or 2 * step_tokens, *(info.max_embeds for info in model.media))
