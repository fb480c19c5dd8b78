"""Long prompts that begin alike, and what follows them."""

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.tensors.sizes import MAX_INLINE_BYTES
from tests.chaos.contexts import PromptVectors, context, context_ones, next_turn
from tests.chaos.outcome import Outcome, Output
from tests.chaos.requests import Request

MODEL = Path("examples/demo_model/penstock-tiny")


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return context_ones(PromptVectors(MODEL), 20, 16)


def test_vectors_are_the_embeddings_of_the_text() -> None:
    tensor = PromptVectors(MODEL)("Once upon a time")
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode("Once upon a time").ids
    with safe_open(str(MODEL / "model.safetensors"), framework="numpy") as weights:
        rows = weights.get_tensor("model.embed_tokens.weight")[ids]
    assert list(tensor.shape) == list(rows.shape)
    assert np.array_equal(np.frombuffer(tensor.inline, "<f4").reshape(rows.shape), rows)


def test_ten_in_a_row_begin_alike(requests: list[Request]) -> None:
    texts = [r.message.text for r in requests if isinstance(r.message, pb.GenerateRequest) and r.message.text]
    assert sum(text.startswith(context(0)) for text in texts) == len(texts) // 2
    assert sum(text.startswith(context(1)) for text in texts) == len(texts) // 2
    assert len(set(texts)) == len(texts)


def test_their_vectors_do_not_go_inline(requests: list[Request]) -> None:
    sizes = [len(r.message.embeds.inline) for r in requests if r.kind.startswith("long, vectors")]
    assert len(sizes) == 4
    assert min(sizes) > MAX_INLINE_BYTES


def test_the_next_turn_begins_with_the_prompt_and_the_answer(requests: list[Request]) -> None:
    said = Outcome(outputs={0: Output(text=" and so on")})
    turn = next_turn(requests[0], said, 16)
    assert turn is not None
    assert turn.message.text.startswith(f"{requests[0].message.text} and so on ")
    chat = next(request for request in requests if request.way == "Chat")
    turn = next_turn(chat, said, 16)
    assert turn is not None
    assert [message.content for message in turn.message.messages][:2] == [
        chat.message.messages[0].content,
        " and so on",
    ]


def test_what_has_no_text_or_several_answers_has_no_next_turn(requests: list[Request]) -> None:
    vectors = next(request for request in requests if request.kind == "long, vectors")
    assert next_turn(vectors, Outcome(outputs={0: Output(text="x")}), 16) is None
    assert next_turn(requests[0], Outcome(outputs={0: Output(), 1: Output()}), 16) is None
