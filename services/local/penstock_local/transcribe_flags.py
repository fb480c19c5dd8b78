"""Flags of ``penstock transcribe``."""

import argparse
import asyncio
from typing import Any

from penstock_local import flags


def add_transcribe(commands: Any) -> None:
    """Add the command ``transcribe`` to the parser of all commands."""
    parser = commands.add_parser(
        "transcribe",
        help="write the text of an audio file",
        description=(
            "Transcribe an audio file on a running server with a Whisper model. The text goes to standard output. A "
            "summary line goes to standard error."
        ),
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_transcribe)
    parser.add_argument(
        "file", metavar="FILE", help="Audio file, such as WAV, FLAC, MP3 or Ogg. - reads the file from standard input."
    )
    parser.add_argument(
        "--address", default=flags.DEFAULT_ADDRESS, help="Address of the server's gRPC API (default: %(default)s)."
    )
    parser.add_argument("--model", metavar="NAME", default="", help="Name of the model (default: the served model).")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="Abort the request after this many seconds (default: no limit).",
    )
    parser.add_argument(
        "--language",
        metavar="LANGUAGE",
        help="Language of the speech, such as de or german (default: the model detects the language).",
    )
    parser.add_argument(
        "--task",
        choices=("transcribe", "translate"),
        help="Write the text in the language of the speech, or translate it to English (default: transcribe).",
    )
    parser.add_argument(
        "--format",
        choices=("text", "srt", "vtt", "json"),
        help="Plain text, subtitles in the format SubRip or WebVTT, or JSON with segments (default: text).",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="Text before the speech, which guides style and spelling.")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="Use only this sampling temperature, from 0 to 1 (default: 0, and higher ones if the text is implausible).",
    )
    parser.add_argument(
        "--seed", type=flags.integer(-(2**63), 2**63 - 1), metavar="N", help="Seed for temperatures above 0."
    )


def _run_transcribe(arguments: argparse.Namespace) -> int:
    from penstock_local.commands.transcribe import TranscribeOptions, transcribe

    return asyncio.run(transcribe(flags.options_of(TranscribeOptions, arguments)))
