"""Where in a prompt embeddings of media stand."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter

from penstock_common.types.media import MultiModalFeature

Span = tuple[int, int]
"""First position, and the one behind the last."""

_END = attrgetter("end")


def first_embed(feature: MultiModalFeature, start: int) -> int | None:
    """The first position from ``start`` on that has an embedding of the feature; None when there is none."""
    for run in feature.embed_runs:
        if feature.offset + run.start + run.count > start:
            return max(feature.offset + run.start, start)
    return None if feature.embed_runs or start >= feature.end else max(feature.offset, start)


def embeds_span(feature: MultiModalFeature) -> Span:
    """From its first embedding to its last, with what stands between."""
    runs = feature.embed_runs
    if not runs:
        return feature.offset, feature.end
    return feature.offset + runs[0].start, feature.offset + runs[-1].start + runs[-1].count


def embeds_from(features: Sequence[MultiModalFeature], start: int) -> Iterator[tuple[int, int]]:
    """Of the features that have embeddings from position ``start`` on, their indices and the first such position, in order."""
    for index in range(bisect_right(features, start, key=_END), len(features)):
        if (position := first_embed(features[index], start)) is not None:
            yield index, position


def span_around(spans: Sequence[Span], position: int) -> Span | None:
    """The one of the ``spans``, which are in order, that a cut before ``position`` would part; None when there is none."""
    index = bisect_right(spans, position, key=lambda span: span[1])
    if index < len(spans) and spans[index][0] < position:
        return spans[index]
    return None
