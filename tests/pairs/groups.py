"""Runs a feature on a data-parallel group of two processes, kills a rank, and compares all answers with a plain
engine's.
"""

import asyncio
import io
import json
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.common.v1.media_pb2 import Media
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.common.v1.structured_output_pb2 import StructuredOutput
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.types.request import EngineCoreRequest
from tests.fakes.multimodal_models import make_image
from tests.fakes.patience import PATIENCE
from tests.fakes.processes import Service
from tests.fakes.systems.cluster import Cluster, read
from tests.fakes.systems.rank_group import RankGroup
from tests.pairs.features import DRAFTS, Feature
from tests.pairs.running import Pair, Sections, plain

COUNT = 60
"""Number of tokens of an answer. The rank is killed before the last token."""
NOT_OF_ENGINES = ("coordinator", "data_parallel")
"""Configuration sections that ``RankGroup`` sets for each rank."""


class GroupPair(Pair):
    """A pair in which one feature is a data-parallel group, with or without expert parallelism."""

    def __init__(self, features: frozenset[Feature], folder: Path) -> None:
        super().__init__(features, folder)
        self.requests = [lengthened(request) for request in self.requests]

    async def check_group(self) -> None:
        """Check two rounds without faults, and one during which a rank is killed."""
        expected = await self.expected_of_frontend() if self.has(Feature.MEDIA) else self.of_plain_engine()
        frontend = {"lora__adapters": json.dumps(self.adapters)} if self.has(Feature.LORA) else {}
        flags = flags_of({name: each for name, each in self.sections().items() if name not in NOT_OF_ENGINES})
        async with RankGroup(
            self.checkpoint.path, size=2, data_parallel__min_size=1, frontend_flags=frontend, **flags
        ) as group:
            for turn in range(2):
                assert await self.answers(group) == expected, f"turn {turn}"
            await self.until_used(group)
            if self.has(Feature.TRANSFER):
                await self.check_middle(group, expected, lambda _: group.ask_for(1))
                moved = await asyncio.to_thread(total, group.engines, "penstock:kv_transfer_blocks_total")
                assert moved > 0, "the rank that left has given no blocks"
                await group.scale(2)
            await self.check_middle(group, expected, lambda rank: rank.kill())

    async def check_middle(
        self, group: RankGroup, expected: list[list[int]], strike: Callable[[Service], Awaitable[object]]
    ) -> None:
        """Call ``strike`` for the last rank once all requests have tokens, and check the answers."""
        ranks = await group.members()
        calls = [
            group.stub.Generate(self.message(number, ranks[number % 2][1])) for number in range(len(self.requests))
        ]
        firsts = await asyncio.gather(*(call.read() for call in calls))
        await strike(ranks[-1][0])
        rest = await asyncio.gather(*map(read, calls))
        found = [[*first.token_ids, *answer.token_ids] for first, answer in zip(firsts, rest, strict=True)]
        assert found == expected, "a rank was lost"

    def of_plain_engine(self) -> list[list[int]]:
        """Return the plain engine's tokens by request."""
        found = self.expected()
        return [found[request.request_id] for request in self.requests]

    async def expected_of_frontend(self) -> list[list[int]]:
        """Return the tokens of a plain engine with a frontend, which builds prompts from images itself."""
        flags = flags_of(plain(self.features, self.checkpoint))
        async with Cluster(self.checkpoint.path, engines=1, **flags) as alone:
            return await self.answers(alone)

    async def answers(self, cluster: Cluster) -> list[list[int]]:
        """Run all requests concurrently, distributed over the ranks of a group."""
        ranks = [number for _, number in await cluster.members()] if isinstance(cluster, RankGroup) else [None]
        calls = [
            cluster.stub.Generate(self.message(number, ranks[number % len(ranks)]))
            for number in range(len(self.requests))
        ]
        return [answer.token_ids for answer in await asyncio.gather(*map(read, calls))]

    @property
    def adapters(self) -> dict[str, str]:
        """Folders of the adapters by name."""
        return {name: adapter.path for name, adapter in self.checkpoint.adapters.items()}

    def message(self, number: int, rank: int | None) -> pb.GenerateRequest:
        """Return a request in the form of the public API."""
        request = self.requests[number]
        of = request.sampling_params
        params = SamplingParams(
            temperature=of.temperature,
            max_tokens=of.max_tokens,
            ignore_eos=of.ignore_eos,
            detokenize=False,
            top_k=of.top_k,
        )
        if of.seed is not None:
            params.seed = of.seed
        if of.structured_output is not None:
            params.structured_output.CopyFrom(StructuredOutput(regex=of.structured_output.regex))
        message = pb.GenerateRequest(sampling_params=params, lora="" if request.lora is None else request.lora.name)
        if self.has(Feature.MEDIA):
            message.mixed.CopyFrom(pb.MixedPrompt(parts=parts_of(number)))
        else:
            message.token_ids.ids.extend(request.prompt_token_ids)
        if rank is not None:
            message.routing.data_parallel_rank = rank
        return message

    async def until_used(self, group: RankGroup) -> None:
        """Repeat the requests until the feature was used: the first copies to the host may arrive too late, since no
        step waits.
        """
        name = ""
        if self.has(*(DRAFTS - {Feature.NGRAM})):
            name = "vllm:spec_decode_num_draft_tokens_total"
        elif self.has(Feature.TIERS):
            name = "vllm:external_prefix_cache_hits_total"
        async with asyncio.timeout(PATIENCE):
            while name and not await asyncio.to_thread(total, group.engines, name):
                await self.answers(group)


def lengthened(request: EngineCoreRequest) -> EngineCoreRequest:
    """Return the request with so many tokens that a rank can be killed while it runs."""
    params = request.sampling_params
    if params.structured_output is None:
        params = msgspec.structs.replace(params, max_tokens=COUNT)
    return msgspec.structs.replace(request, sampling_params=params)


def flags_of(sections: Sections) -> dict[str, Any]:
    """Return configuration sections as flags of a service."""
    return {
        f"{section}__{key}": str(value).lower() if isinstance(value, bool) else value
        for section, settings in sections.items()
        for key, value in settings.items()
    }


def parts_of(number: int) -> list[pb.PromptPart]:
    """Return the parts of a prompt with a separate image for each number."""
    file = io.BytesIO()
    make_image(40 + 10 * number, 60, seed=number).save(file, "PNG")
    image = pb.PromptPart(media=Media(modality="image", data=file.getvalue()))
    return [pb.PromptPart(text="What is in "), image, pb.PromptPart(text=f" and in picture {number}?")]


def total(engines: Sequence[Service], name: str) -> float:
    """Return the sum of a metric over all engines and series."""
    found = 0.0
    for engine in engines:
        with urllib.request.urlopen(f"http://{engine.host}:{engine.metrics_port}/metrics") as response:
            lines = response.read().decode().splitlines()
        found += sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))
    return found
