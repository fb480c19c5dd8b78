"""Log-probabilities as a table for the terminal."""

from collections.abc import Iterator

from penstock_common.types.logprobs import Logprobs

_HEADER = ("token", "logprob", "rank", "likeliest")


def logprobs_table(logprobs: Logprobs) -> Iterator[str]:
    """Lines: a header, then one per position with the chosen token, its numbers, and the likeliest tokens with theirs."""
    rows = [_HEADER, *(_row(logprobs, position) for position in range(len(logprobs)))]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for token, logprob, rank, likeliest in rows:
        yield f"{token:<{widths[0]}}  {logprob:>{widths[1]}}  {rank:>{widths[2]}}  {likeliest}".rstrip()


def _row(logprobs: Logprobs, position: int) -> tuple[str, str, str, str]:
    first, end = logprobs.offsets[position : position + 2]
    likeliest = (f"{_token(logprobs, entry)} {logprobs.logprobs[entry]:.2f}" for entry in range(first + 1, end))
    return _token(logprobs, first), f"{logprobs.logprobs[first]:.4f}", str(logprobs.ranks[first]), "  ".join(likeliest)


def _token(logprobs: Logprobs, entry: int) -> str:
    """The text in quotes, so that spaces show, or the id where the server gives no texts."""
    return repr(logprobs.tokens[entry]) if logprobs.tokens else str(logprobs.token_ids[entry])
