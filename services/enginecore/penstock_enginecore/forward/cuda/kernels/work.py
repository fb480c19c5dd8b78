"""Assignment of work to the programs of a Triton kernel."""

import triton
import triton.language as tl


@triton.jit
def load_lengths(query_start_loc, seq_lens, requests, there):
    """Return for each request the index of its first token, its number of new tokens, and its length. A request of
    length 0 counts as a request without new tokens: it is padding, or a library computes its attention.
    """
    begins = tl.load(query_start_loc + requests, mask=there, other=0)
    ends = tl.load(query_start_loc + requests + 1, mask=there, other=0)
    lengths = tl.load(seq_lens + requests, mask=there, other=0)
    return begins, tl.where(lengths > 0, ends - begins, 0), lengths


@triton.jit
def find(counts, upto, indices, piece):
    """Return the index of the owner (for example the request) of ``piece``, and the index of ``piece`` among this
    owner's pieces.

    Owner i has ``counts[i]`` consecutive pieces. ``upto`` has the running sums of ``counts``.
    """
    owner = tl.sum((upto <= piece).to(tl.int32), 0)
    return owner, piece - tl.sum(tl.where(indices < owner, counts, 0), 0)
