"""Whether two checkpoints mean the same by their token ids."""

from pathlib import Path

from tokenizers import Tokenizer

from penstock_common.input_files import read_input
from penstock_enginecore.models.errors import ModelLoadError


def check_vocabulary(model: Path, drafter: Path) -> None:
    """Raise ModelLoadError with the first token id that stands for something else in the checkpoint that drafts. Checkpoints
    without a ``tokenizer.json`` are not compared.
    """
    files = [folder / "tokenizer.json" for folder in (model, drafter)]
    if not all(file.is_file() for file in files):
        return
    ours, theirs = (_texts(file) for file in files)
    for token_id in sorted(ours.keys() | theirs.keys()):
        if ours.get(token_id) != theirs.get(token_id):
            raise ModelLoadError(
                f"speculative.model is {str(drafter)!r}, whose token {token_id} is {_said(theirs.get(token_id))}; the model's is "
                f"{_said(ours.get(token_id))}: what drafts must have the model's vocabulary"
            )


def _texts(file: Path) -> dict[int, str]:
    return {token_id: text for text, token_id in Tokenizer.from_buffer(read_input(file)).get_vocab().items()}


def _said(text: str | None) -> str:
    return "missing" if text is None else repr(text)
