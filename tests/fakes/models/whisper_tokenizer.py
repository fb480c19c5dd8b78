"""Small tokenizer with the control tokens of Whisper."""

import functools

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

END = "<|endoftext|>"
LANGUAGES = ("en", "zh", "de", "fr", "yue")
_CONTROL = (
    END,
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)


@functools.cache
def _described() -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _CONTROL])
    tokenizer.add_tokens([AddedToken(f"<|{i * 0.02:.2f}|>", normalized=False) for i in range(1501)])
    return tokenizer.to_str()


def whisper_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer with a token for each byte, the control tokens of Whisper, and its timestamps."""
    return tokenizers.Tokenizer.from_str(_described())
