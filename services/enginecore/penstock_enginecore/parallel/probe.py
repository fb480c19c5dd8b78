"""What a model makes of a few tokens, whichever attention it was loaded with."""

from typing import Any, cast

import torch
from transformers import PreTrainedModel

from penstock_enginecore.models.attention_hook import AttentionCall, use_context

_NUM_TOKENS = 8


class _Causal:
    """An ``AttentionContext``: each token sees itself and those before."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """``[tokens, num_heads, head_size_v]``."""
        query, key, value = (each.transpose(0, 1) for each in (call.query, call.key, call.value))
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, enable_gqa=True
        )
        return attended[0].transpose(0, 1)


@torch.inference_mode()
def probe_logits(module: PreTrainedModel) -> torch.Tensor:
    """Logits float32 ``[tokens, vocab]`` of tokens from all over the vocabulary, at the positions from 0 on; of a model without a
    head its hidden states.
    """
    positions = torch.arange(_NUM_TOKENS, device=module.device)
    token_ids = (positions + 1) * 7919 % module.config.vocab_size
    model: Any = module.train(mode=False)
    with use_context(_Causal()):
        output = model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
    found = output.logits if "logits" in output else output.last_hidden_state
    return cast("torch.Tensor", found[0].float())
