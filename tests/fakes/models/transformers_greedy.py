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


def distinct_greedy_tokens(model: Any, prompt: list[int], count: int, margin: float = 5e-4) -> list[int] | None:
    """Return the next ``count`` greedy tokens, or None if a token's logit is not larger than all others by ``margin``.
    Other orders of summation, as on other processors, can then give other tokens.
    """
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": count, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    largest = torch.cat(out.logits).topk(2).values
    tokens: list[int] = out.sequences[0, len(prompt) :].tolist()
    return tokens if bool((largest[:, 0] - largest[:, 1] >= margin).all()) else None
