"""Family of PaddleOCR-VL. Images keep their aspect ratio in this model.

https://huggingface.co/docs/transformers/model_doc/paddleocr_vl
"""

from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.qwen_vl import CHANNELS, Grids, image_grids
from penstock_frontend.processing.media.families.single_images import ImageFamily

_PIXELS = (384 * 384, 1536 * 1536)
"""Limits of transformers' processor, if the checkpoint's processor does not set them."""


class _PatchGrids(Grids):
    """Format of images whose patches are small images. Some configurations have a temporal patch size above 1, which
    neither the processor nor the encoder uses.
    """

    @property
    def patch_shape(self) -> tuple[int, ...]:
        return (CHANNELS, self.patch_size, self.patch_size)


class PaddleOCRVL(ImageFamily):
    """Family of PaddleOCR-VL, whose prompts have one token for each embedding."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        grids = _PatchGrids(*image_grids(checkpoint, checkpoint.image_processor, default_pixels=_PIXELS))
        token = checkpoint.token("image_token", "<|IMAGE_PLACEHOLDER|>")
        super().__init__(checkpoint, token, grids._replace(temporal_patch_size=1))
