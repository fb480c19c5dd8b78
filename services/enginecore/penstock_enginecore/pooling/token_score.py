"""Scores of generative rerankers, such as Qwen3-Reranker: the logit of one token after a pair of texts, or the difference
of the logits of two tokens.

sentence-transformers calls this ``LogitScore``. Its files name the tokens. Without these files, the tokens are "yes" and
"no".
"""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PretrainedConfig

from penstock_common.files import read_json
from penstock_enginecore.models.errors import ModelLoadError

_KIND = "LogitScore"
_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier")
"""Settings with which some models multiply their logits."""


@dataclass(frozen=True, slots=True)
class ScoreTokens:
    """Ids of the tokens whose logits are compared. Without ``false``, the logit of ``true`` is the score."""

    true: int
    false: int | None


def score_tokens(directory: Path) -> ScoreTokens | None:
    """Return the tokens that the files of sentence-transformers name, or None if they name none. Raises ModelLoadError
    if a file cannot be read.
    """
    file = directory / "modules.json"
    modules = _read(file) if file.is_file() else []
    if not isinstance(modules, list):
        raise ModelLoadError(f"{file} must contain a list")
    for module in modules:
        if str(module.get("type", "")).rpartition(".")[2] == _KIND:
            config = _read(directory / module.get("path", "") / "config.json")
            found = config.get("true_token_id"), config.get("false_token_id")
            if not isinstance(found[0], int) or not isinstance(found[1], int | None):
                raise ModelLoadError(f"{file}: true_token_id and false_token_id of {_KIND} must be ids of tokens")
            return ScoreTokens(*found)
    return None


def yes_and_no(directory: Path) -> ScoreTokens:
    """Return the ids of "yes" and "no", the tokens of generative rerankers whose files name no others. Raises
    ModelLoadError if the tokenizer does not have them.
    """
    try:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as e:  # The errors of the library have no common base class.
        raise ModelLoadError(f"tokenizer.json of {directory} cannot be read: {e}") from e
    yes, no = (tokenizer.token_to_id(word) for word in ("yes", "no"))
    if yes is None or no is None:
        raise ModelLoadError(
            "the model has no classification head, and its tokenizer lacks the tokens 'yes' and 'no' of generative rerankers; "
            f"add a module {_KIND} to modules.json, which names the tokens"
        )
    return ScoreTokens(yes, no)


def _read(file: Path) -> Any:
    try:
        return read_json(file)
    except (OSError, ValueError) as e:
        raise ModelLoadError(f"{file} cannot be read: {e}") from e


class TokenScorer(torch.nn.Module):
    """Classifier with one label, whose score is computed from the logits of ``ScoreTokens``.

    The class has the parts of transformers' classifiers that ``Head`` uses: ``model``, which returns hidden states, and
    ``config``.
    """

    base_model_prefix = "model"

    def __init__(self, generates: Any, tokens: ScoreTokens, model: torch.nn.Module) -> None:
        """Copy the rows of the output head of the model ``generates`` that belong to ``tokens``. ``model`` returns hidden
        states ``[1, tokens, hidden size]``. Raises ModelLoadError if the logits need more than these rows.
        """
        super().__init__()
        config: Any = generates.config
        head: Any = generates.get_output_embeddings()
        reason = None if type(head) is torch.nn.Linear else "its output head is not a linear layer"
        reason = reason or _unsupported(config)
        ids = [each for each in (tokens.true, tokens.false) if each is not None]
        if reason is None and not all(0 <= each < len(head.weight) for each in ids):
            reason = f"the ids {ids} of its score tokens are not below its vocabulary size, {len(head.weight)}"
        if reason is not None:
            raise ModelLoadError(f"{type(generates).__name__} cannot score pairs of texts: {reason}")
        self.model = model
        self.config = config
        self._cap = getattr(config, "final_logit_softcapping", None)
        bias = head.bias is not None
        self.score = torch.nn.Linear(
            head.in_features, len(ids), bias=bias, dtype=torch.float32, device=head.weight.device
        )
        with torch.no_grad():
            self.score.weight.copy_(head.weight[ids])
            if bias:
                self.score.bias.copy_(head.bias[ids])
        self.requires_grad_(requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        """Return the score of the last token as ``logits`` ``[1, 1]``."""
        hidden = self.model(input_ids).last_hidden_state[:, -1].float()
        logits = self.score(hidden)
        if self._cap:
            logits = torch.tanh(logits / self._cap) * self._cap
        return SimpleNamespace(logits=logits[:, :1] - logits[:, 1:2] if logits.shape[1] > 1 else logits)


def _unsupported(config: PretrainedConfig) -> str | None:
    for name in _SCALES:
        if (value := getattr(config, name, None)) not in (None, 1, 1.0):
            return f"its {name} is {value}; supported: 1"
    return None
