"""What stands in a prompt for an item of several pieces, with texts between."""

from collections.abc import Sequence

from penstock_common.types.media import EmbedRun
from penstock_frontend.processing.media.item import Replacement


def grown(token_ids: Sequence[int], token_id: int, count: int, *, before: str = "", after: str = "") -> Replacement:
    """The token ids with ``count`` of ``token_id`` in place of each one, all of which are replaced by rows."""
    grown_ids: list[int] = []
    runs: list[EmbedRun] = []
    for each in token_ids:
        if each == token_id:
            runs.append(EmbedRun(len(grown_ids), count))
            grown_ids += [token_id] * count
        else:
            grown_ids.append(each)
    return Replacement(grown_ids, tuple(runs), before=before, after=after)
