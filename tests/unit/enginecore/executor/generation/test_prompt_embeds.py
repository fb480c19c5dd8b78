"""Prompts of vectors in an engine: once for all sequences of a request."""

import torch

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.rpc.outputs import prompt_embeds_to_proto
from penstock_common.tensors.chunks import IncomingTensors, TensorRef
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.scheduler.output import NewRequestData, SchedulerOutput
from penstock_enginecore.executor.generation.input_batch import InputBatch
from penstock_enginecore.executor.generation.prompt_embeds import PromptVectors
from penstock_enginecore.rpc.request_tensors import PromptReader

ROWS = torch.arange(12, dtype=torch.float32).view(3, 4)
MIXED = PromptEmbeds(
    dtype="float32",
    num_tokens=5,
    hidden_size=4,
    data=bytearray(ROWS.numpy().tobytes()),
    is_token=bytes([0, 1, 0, 1, 0]),
)


def step(embeds: PromptEmbeds, *request_ids: str, num_tokens: int = 5) -> SchedulerOutput:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    new = [
        NewRequestData(
            request_id=request_id,
            token_ids=[9] * 5,
            num_prompt_tokens=5,
            num_computed_tokens=0,
            block_ids=([2 * number, 2 * number + 1],),
            sampling_params=params,
            prompt_embeds=embeds,
        )
        for number, request_id in enumerate(request_ids)
    ]
    return SchedulerOutput(new_requests=new, num_scheduled_tokens=dict.fromkeys(request_ids, num_tokens))


def test_the_rows_of_a_mixed_prompt_go_to_the_places_of_its_vectors() -> None:
    batch = InputBatch(max_model_len=8, block_size=4, num_groups=1, eos_token_ids=frozenset())
    vectors = PromptVectors(torch.float32, torch.device("cpu"))
    scheduled = step(MIXED, "a", "b", num_tokens=4)
    batch.update(scheduled)
    vectors.update(scheduled)
    found = vectors.of(batch.prepare(scheduled.num_scheduled_tokens))
    assert found is not None
    assert found.indices.tolist() == [0, 2, 4, 6]
    assert torch.equal(found.rows, ROWS[[0, 1, 0, 1]])


def test_requests_with_one_prompt_share_its_rows_and_the_last_takes_them_away() -> None:
    vectors = PromptVectors(torch.bfloat16, torch.device("cpu"))
    vectors.update(step(MIXED, *map(str, range(8))))
    assert len({prompt.rows.data_ptr() for prompt in vectors._prompts.values()}) == 1
    vectors.update(SchedulerOutput(finished_request_ids=list(map(str, range(8)))))
    assert len(vectors._shared) == 0


def add(transfer_id: int, *, keep: bool, **fields: object) -> pb.EngineCoreRequest:
    tensor = prompt_embeds_to_proto(MIXED, TensorRef(transfer_id, len(MIXED.data), keep))
    return pb.EngineCoreRequest(prompt_embeds=tensor, prompt_is_token_ids=map(bool, MIXED.is_token), **fields)


def test_requests_that_refer_to_one_tensor_get_one_object() -> None:
    reader = PromptReader(IncomingTensors(1000))
    reader.tensors.add(1, 0, bytes(MIXED.data))
    first, second = reader.read(add(1, keep=True)), reader.read(add(1, keep=False))
    assert first is second
    assert first is not None
    assert first.is_alike(MIXED)
    assert first.data == MIXED.data
    assert reader.tensors.num_bytes == 0


def test_a_row_for_every_position_is_taken_as_well() -> None:
    whole = prompt_embeds_to_proto(MIXED, every_position=True)
    assert list(whole.shape) == [5, 4]
    read = PromptReader(IncomingTensors(1000)).read(
        pb.EngineCoreRequest(prompt_embeds=whole, prompt_is_token_ids=map(bool, MIXED.is_token))
    )
    assert read is not None
    assert read.is_alike(MIXED)
    assert read.data == MIXED.data


def test_vectors_none_of_which_stands_for_a_token_are_none() -> None:
    tensor = prompt_embeds_to_proto(MIXED)
    assert (
        PromptReader(IncomingTensors(1000)).read(
            pb.EngineCoreRequest(prompt_embeds=tensor, prompt_is_token_ids=[True] * 3)
        )
        is None
    )
