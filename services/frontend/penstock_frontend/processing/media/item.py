"""What a media worker makes of a medium."""

import msgspec

from penstock_common.types.media import EmbedRun, Modality, TensorData


class ProcessedItem(msgspec.Struct, frozen=True, kw_only=True):
    """A medium as the model takes it.

    ``data``: what the model's processor in transformers gives for this item alone, under its names, with its leading dimension
    of 1 where it has one. Pixels are uint8: neither rescaled nor normalized. ``num_embeds``: rows that the model's tower makes of
    it. ``layout``: what else its family needs to know to put it into a prompt, as numbers (rows and columns of tiles, ...).
    """

    modality: Modality
    data: dict[str, TensorData]
    num_embeds: int
    layout: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of its data."""
        return sum(len(tensor.data) for tensor in self.data.values())


class Replacement(msgspec.Struct, frozen=True):
    """What stands in a prompt for an item: ``token_ids``, of which those at ``embed_runs`` (empty: all) are replaced by rows.

    ``before`` and ``after``: texts that stand around it, tokenized together with the prompt's own text there. ``data``: what the
    tower gets in place of the item's data; empty: these. ``variant``: says what that is, where it is not always the same of the
    item.
    """

    token_ids: list[int]
    embed_runs: tuple[EmbedRun, ...] = ()
    before: str = ""
    after: str = ""
    data: dict[str, TensorData] = {}
    variant: str = ""

    @property
    def num_embeds(self) -> int:
        """Rows that are put into it."""
        return sum(run.count for run in self.embed_runs) if self.embed_runs else len(self.token_ids)
