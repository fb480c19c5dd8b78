"""Reference for greedy tokens: transformers' own ``generate``."""

from typing import Any

import torch


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return the next ``count`` greedy tokens of transformers' ``model`` after ``prompt``; fewer if a token ends the
    output.
    """
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
