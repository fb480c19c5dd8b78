"""vLLM engine in a separate process, controlled over pipes. ``kv_peer`` starts this program with vLLM's interpreter.

``python kv_peer_engine.py OPTIONS``: OPTIONS are arguments of vLLM's ``LLM``, as JSON. It prints ``{}`` when it is
ready, and then answers each input line with one output line. vLLM's log goes to standard error. Input lines are
``{"prompt": token ids, "tokens": number of tokens to generate}`` or ``{"reset": true}``, which empties the prefix
cache.
"""

import json
import os
import sys
import time
from typing import IO, Any

# Run the engine in this process, like Penstock's engine in its process.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def generate(engine: Any, number: int, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Return the seconds from a request's arrival to its first token, all tokens, and the number of cached prompt
    tokens.
    """
    from vllm import SamplingParams, TokensPrompt  # type: ignore[import-not-found]

    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False)
    began, first, found, cached = time.monotonic(), 0.0, [], 0
    engine.add_request(str(number), TokensPrompt(prompt_token_ids=prompt), params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            first = first or time.monotonic()
            found, cached = list(output.outputs[0].token_ids), output.num_cached_tokens
    return {"seconds": first - began, "tokens": found, "cached": cached}


def main(answers: IO[str]) -> None:
    """Answer requests until the input ends."""
    from vllm import LLM

    engine = LLM(**json.loads(sys.argv[1])).llm_engine
    print("{}", file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        if "reset" in asked:
            found: dict[str, Any] = {"reset": engine.reset_prefix_cache()}
        else:
            found = generate(engine, number, asked["prompt"], asked["tokens"])
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    ours = os.dup(1)
    os.dup2(2, 1)  # keep vLLM's prints out of the answers
    with os.fdopen(ours, "w") as output:
        main(output)
