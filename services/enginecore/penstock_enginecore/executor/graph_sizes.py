"""Which decode steps are captured before an engine is ready."""

from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.forward.cuda.buffers import decode_sizes


def sizes_to_capture(config: EngineCoreConfig) -> list[int]:
    """In tokens, the largest first, so that graphs of smaller ones find memory. Empty where none are to be."""
    if not config.kernels.capture_at_start:
        return []
    limits = config.scheduler
    sizes = decode_sizes(min(limits.max_num_seqs, limits.step_tokens))
    wanted = config.kernels.graph_sizes
    if wanted:
        sizes = [size for size in sizes if any(decode_sizes(each)[-1] == size for each in wanted)]
    return sorted(sizes, reverse=True)
