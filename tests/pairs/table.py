"""Table of pairs. A pair is refused, needs no separate test, or is compared with a plain engine by a test."""

import itertools
from collections.abc import Iterator, Mapping

import msgspec

from tests.pairs.features import DRAFTS, GROUPS, Feature

Two = frozenset[Feature]


class Refused(msgspec.Struct, frozen=True):
    """A pair that is refused: the engine does not start, or refuses the request.

    ``message`` is a regular expression for the error message.
    """

    message: str


class SameAs(msgspec.Struct, frozen=True):
    """A pair without a separate test, because another pair or one feature alone has the same test."""

    why: str


class Tested(msgspec.Struct, frozen=True):
    """A pair that is compared with a plain engine.

    ``kill`` names a process that is killed during a second comparison.
    """

    kill: str = ""


Verdict = Refused | SameAs | Tested


def _refused() -> dict[Two, Refused]:
    found: dict[Two, Refused] = {}
    stages = Feature.PIPELINE, Feature.NODES
    for way in stages:
        for draft in DRAFTS:
            found[frozenset({way, draft})] = Refused("speculative decoding supports only 1 pipeline stage")
        found[frozenset({way, Feature.MEDIA})] = Refused(
            "executor.pipeline_parallel_size is 2, which is not supported for a model that accepts image, video"
        )
        found[frozenset({way, Feature.POOLING})] = Refused("models with task embed support only 1")
    for way in (Feature.TENSOR, *stages):
        found[frozenset({way, Feature.INT8})] = Refused(
            "the executor has 2 workers, and int8 is supported only with one"
        )
    for group in GROUPS:
        found[frozenset({group, Feature.ASYNC})] = Refused("data-parallel ranks do not support asynchronous scheduling")
        for way in (Feature.TENSOR, *stages):
            found[frozenset({group, way})] = Refused("a data-parallel rank supports only the value 1")
        found[frozenset({group, Feature.SLEEP})] = Refused("sleep is not supported for ranks of a data-parallel group")
    found[frozenset({Feature.GROUP, Feature.POOLING})] = Refused("data-parallel groups need a generating model")
    found[frozenset({Feature.EXPERTS, Feature.POOLING})] = Refused("expert parallelism supports only the task generate")
    found[frozenset({Feature.EXPERTS, Feature.MEDIA})] = Refused(
        "experts of such models cannot be shared between ranks yet"
    )
    found[frozenset({Feature.EXPERTS, Feature.QUANTIZED})] = Refused("experts cannot be shared between ranks yet")
    for draft in DRAFTS:
        found[frozenset({draft, Feature.POOLING})] = Refused("only generating models support speculative decoding")
    found[frozenset({Feature.TIERS, Feature.POOLING})] = Refused("pooling models have no KV cache")
    found[frozenset({Feature.TRANSFER, Feature.POOLING})] = Refused("pooling models have no KV cache")
    found[frozenset({Feature.INT8, Feature.QUANTIZED})] = Refused("the checkpoint is already quantized")
    return found


REFUSED: Mapping[Two, Refused] = _refused()

SAME: Mapping[Two, SameAs] = {
    frozenset({Feature.GROUP, Feature.EXPERTS}): SameAs("Only the ranks of a data-parallel group can share experts."),
    frozenset({Feature.PIPELINE, Feature.NODES}): SameAs("In the tests, each node is one stage of a pipeline."),
    **{
        frozenset(two): SameAs("An engine uses only one drafting method.")
        for two in itertools.combinations(sorted(DRAFTS), 2)
    },
    frozenset({Feature.MTP, Feature.WINDOWS}): SameAs(
        "Models with a multi-token-prediction layer have no sliding windows."
    ),
    frozenset({Feature.STRUCTURED, Feature.POOLING}): SameAs("Embedding requests have no output to constrain."),
}


def pairs() -> Iterator[tuple[Two, Verdict]]:
    """Return all pairs with their entries, in the order of the table."""
    for one, other in itertools.combinations(Feature, 2):
        two = frozenset({one, other})
        yield two, REFUSED.get(two) or SAME.get(two) or Tested(_killed(two))


def _killed(two: Two) -> str:
    """Return the name of the process that is killed while the pair's requests run."""
    if two & GROUPS:
        return "a rank"
    if Feature.NODES in two:
        return "a node"
    if Feature.TRANSFER in two:
        return "the engine that gives the blocks"
    return "" if Feature.POOLING in two else "the engine"


def name_of(two: Two) -> str:
    """Return the pair's name in tests."""
    return "-".join(feature.value for feature in Feature if feature in two)
