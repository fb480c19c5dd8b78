"""Prompts with images and sound in the form that a frontend sends, and the tokens that transformers generates for them."""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, PreTrainedModel
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

from penstock_common.types.media import MODALITIES, EmbedRun, MultiModalFeature, TensorData
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from tests.fakes.multimodal_items import WITHOUT_PILLOW

Sound = npt.NDArray[np.float32]
Frames = list[Image.Image]
Item = Image.Image | Sound | Frames


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt: ``token_ids`` with the placeholders of ``features``, and the equivalent ``inputs`` of transformers'
    ``model``.
    """

    token_ids: list[int]
    features: list[MultiModalFeature]
    inputs: dict[str, Any]
    model: Any

    def request(self, request_id: str, max_tokens: int, **params: Any) -> EngineCoreRequest:
        """Return a greedy request whose output no token ends."""
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=self.token_ids,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params),
            mm_features=self.features,
        )

    def expected(self, count: int) -> list[int]:
        """Return the next tokens that transformers generates."""
        out = self.model.generate(**self.inputs, eos_token_id=None, max_new_tokens=count, do_sample=False)
        return [int(token) for token in out[0, len(self.token_ids) :]]

    @torch.no_grad()
    def logprobs_of(self, token_ids: list[int]) -> list[float]:
        """Return transformers' log-probabilities of these tokens after the prompt."""
        whole = self.followed_by([*self.token_ids[self.features[-1].end :], *token_ids])
        logprobs = self.model(**whole.inputs, use_cache=False).logits[0].log_softmax(-1)
        first = len(self.token_ids) - 1
        return [float(logprobs[first + index, token]) for index, token in enumerate(token_ids)]

    def followed_by(self, token_ids: list[int]) -> "MediaPrompt":
        """Return the prompt up to its last item, followed by these tokens."""
        kept = self.features[-1].end
        inputs = {name: value[:, :kept] if _is_of_tokens(name) else value for name, value in self.inputs.items()}
        behind = {
            name: torch.full((1, len(token_ids)), name == "attention_mask") for name in inputs if _is_of_tokens(name)
        }
        behind["input_ids"] = torch.tensor([token_ids])
        joined = {
            name: torch.cat([value, behind[name].to(value.dtype)], dim=1) if name in behind else value
            for name, value in inputs.items()
        }
        return MediaPrompt(self.token_ids[:kept] + token_ids, self.features, joined, self.model)


class PromptMaker:
    """Makes prompts for the checkpoint at ``directory``. ``model`` is the same checkpoint in transformers."""

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
        self.model = model
        smolvlm: Any = processing_smolvlm
        smolvlm.num2words = smolvlm.num2words or str  # it requires this package, but uses it only for videos
        processors: Any = AutoProcessor
        self.processor = processors.from_pretrained(directory)
        if isinstance(self.processor, VoxtralProcessor):
            self.processor = _VoxtralWithoutMistral(self.processor)
        self._marks = {modality: self._mark(modality) for modality in MODALITIES}
        config: Any = model.config
        self._tokens = {
            modality: getattr(config, f"{modality}_token_id", getattr(config, f"{modality}_token_index", None))
            for modality in MODALITIES
        }
        if config.model_type.startswith("glm"):  # a video is a sequence of images
            self._tokens["video"] = self._tokens["image"]
        if self._marks["image"]:
            image_processors: Any = AutoImageProcessor
            backend = "torchvision" if config.model_type in WITHOUT_PILLOW else "pil"
            self._pixels = image_processors.from_pretrained(directory, backend=backend)
            self.processor.image_processor = self._pixels

    def _mark(self, modality: str) -> str:
        """Return the chat template's text for an item; empty if the family does not support its modality."""
        message = [{"role": "user", "content": [{"type": modality}]}]
        text: str = self.processor.apply_chat_template(message, tokenize=False)
        return text.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n")

    def make(self, *parts: str | Item) -> MediaPrompt:
        """Return the prompt of texts and items in their order."""
        text = "".join(part if isinstance(part, str) else self._marks[_modality(part)] for part in parts)
        inputs = self._processed(text, [part for part in parts if not isinstance(part, str)])
        token_ids: list[int] = inputs["input_ids"][0].tolist()
        features, behind = [], 0
        for part in parts:
            if not isinstance(part, str):
                features.append(self._feature(token_ids, part, behind))
                behind = features[-1].end
        return MediaPrompt(token_ids, features, inputs, self.model)

    def _feature(self, token_ids: Sequence[int], item: Item, start: int) -> MultiModalFeature:
        """Return the feature of the next item from position ``start`` on."""
        modality = _modality(item)
        token = self._tokens[modality]
        alone = self._processed(self._marks[modality], [item])
        count = int((alone["input_ids"] == token).sum())
        places = [place for place in range(start, len(token_ids)) if token_ids[place] == token][:count]
        offset = places[0]
        runs = []
        for _, run in itertools.groupby(enumerate(places), lambda each: each[1] - each[0]):
            members = [place for _, place in run]
            runs.append(EmbedRun(members[0] - offset, len(members)))
        length = places[-1] + 1 - offset
        data = self._data(item)
        return MultiModalFeature(
            modality=modality,
            identifier=_identifier(data),
            offset=offset,
            length=length,
            embed_runs=() if length == count else tuple(runs),
            data=data,
        )

    def _processed(self, text: str, items: Sequence[Item]) -> dict[str, Any]:
        """Return the processor's result for a text with items."""
        media: dict[str, Any] = {}
        if images := [item for item in items if isinstance(item, Image.Image)]:
            media["images"] = images
        if sounds := [item for item in items if isinstance(item, np.ndarray)]:
            media |= {"audio": sounds, "sampling_rate": 16_000}
        if videos := [np.stack([np.asarray(frame) for frame in item]) for item in items if isinstance(item, list)]:
            metadata = [
                {"fps": 2.0, "total_num_frames": len(video), "frames_indices": [*range(len(video))]} for video in videos
            ]
            media |= {"videos": videos, "do_sample_frames": False, "video_metadata": metadata}
        found = dict(self.processor(text=[text], return_tensors="pt", **media))
        return {name: each.float() if each.dtype == torch.bfloat16 else each for name, each in found.items()}

    def _data(self, item: Item) -> dict[str, TensorData]:
        """Return an item as a media worker does: alone, with pixels that are not normalized yet."""
        if isinstance(item, Image.Image):
            options = {"return_tensors": "np", "do_rescale": False, "do_normalize": False}
            if (merge := getattr(self.processor, "spatial_merge_size", 1)) > 1:  # Pixtral's processor uses this key
                options["patch_size"] = self.processor.patch_size * merge
            made = self._pixels(images=[item], **options)
            return {name: _tensor(np.asarray(value)) for name, value in made.items()}
        alone = self._processed(self._marks[_modality(item)], [item])
        return {
            name: _tensor(value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value, dtype=np.float32))
            for name, value in alone.items()
            if not _is_of_tokens(name)
        }


class _VoxtralWithoutMistral:
    """``VoxtralProcessor`` for checkpoints without Mistral's own tokenizer. It inserts the placeholders itself."""

    TOKENS = 375
    """Number of tokens of a window of 30 seconds."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.apply_chat_template = processor.tokenizer.apply_chat_template

    def __call__(self, text: list[str], audio: Sequence[Sound] = (), **_: Any) -> dict[str, torch.Tensor]:
        """Return the inputs of a text with audio, as other processors do."""
        windows = [
            self._processor._retrieve_input_features(
                [sound],
                3000,
                sampling_rate=16_000,
                padding=True,
                truncation=False,
                pad_to_multiple_of=480_000,
                return_tensors="pt",
            )
            for sound in audio
        ]
        parts = text[0].split("[AUDIO]")
        sounds = ["[AUDIO]" * (self.TOKENS * len(each)) for each in windows]
        whole = parts[0] + "".join(sound + part for sound, part in zip(sounds, parts[1:], strict=True))
        inputs: dict[str, torch.Tensor] = dict(self._processor.tokenizer(whole, return_tensors="pt"))
        inputs.pop("token_type_ids", None)
        return inputs | ({"input_features": torch.cat(windows)} if windows else {})


def _is_of_tokens(name: str) -> bool:
    return name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def _modality(item: Item) -> Any:
    if isinstance(item, Image.Image):
        return "image"
    return "video" if isinstance(item, list) else "audio"


def _tensor(array: npt.NDArray[Any]) -> TensorData:
    if array.dtype == np.float32 and array.max(initial=0) > 100:  # pixels that the processor has converted to floats
        array = array.astype(np.uint8)
    dtype: Any = str(array.dtype)
    return TensorData(dtype=dtype, shape=array.shape, data=np.ascontiguousarray(array).tobytes())


def _identifier(data: dict[str, TensorData]) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for name, tensor in sorted(data.items()):
        digest.update(repr((name, tensor.dtype, tensor.shape)).encode() + tensor.data)
    return digest.hexdigest()
