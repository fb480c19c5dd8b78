"""Media family with transformers' CLIP image processor, as a media worker uses it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from PIL.Image import Image

from penstock_common.types.media import TensorData
from penstock_frontend.processing.media.families.base import FamilyProcessor, ProcessedItem
from tests.fakes.media_family import PlainFamily, PlainProcessor


class ClipFamily(PlainFamily):
    """Family with CLIP's processor. ``folder``: directory with a preprocessor_config.json."""

    identity = b"clip"

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        return partial(ClipProcessor, self._folder)


class ClipProcessor(PlainProcessor):
    """Processor that also reports loaded modules, if its arguments contain ``modules``."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoImageProcessor

        super().__init__("")
        load: Any = AutoImageProcessor.from_pretrained
        self._processor = load(folder, backend="pil")

    def image(self, image: Image, kwargs: Mapping[str, Any]) -> ProcessedItem:
        if kwargs.get("modules"):
            return super().image(image, {"torch": True})
        made = self._processor(images=[image], return_tensors="np", do_rescale=False, do_normalize=False)
        data = {name: TensorData(str(a.dtype), a.shape, a.tobytes()) for name, a in made.items()}  # type: ignore[arg-type]
        return ProcessedItem(modality="image", data=data, num_embeds=1)
