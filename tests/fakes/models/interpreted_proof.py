"""The fused decoder with the Triton kernels in their interpreter, proved for families: a process of its own, in which
TRITON_INTERPRET is set before anything imports Triton.

    python -m tests.fakes.models.interpreted_proof llama gemma3 llama/awq

prints what speaks against each, by its name, as JSON; behind a slash the format of weights that stay quantized.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

from penstock_enginecore.forward.cuda.decoder import FusedForward
from penstock_enginecore.forward.cuda.linear import keeps
from tests.fakes.models.fused_models import load_probed, prove, save_varied_model
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.quantized_models import save_quantized_model

KINDS = {"gemma3": {"layer_types": ["sliding_attention", "full_attention"]}}


def main(names: list[str]) -> None:
    """Proves each of ``names`` on a tiny model."""
    torch.set_num_threads(1)
    interpreted("attention")  # all kernels with it, the quick way
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels

    kernels = TritonKernels()
    against: dict[str, str] = {}
    for name in names:
        architecture, _, form = name.partition("/")
        with tempfile.TemporaryDirectory() as directory:
            if form:
                save_quantized_model(architecture, form, Path(directory), hidden_size=64)
            else:
                save_varied_model(architecture, Path(directory), **KINDS.get(architecture, {}))
            probed = load_probed(Path(directory), keeps)
            against[name] = prove(probed, lambda probed=probed: FusedForward(probed, kernels)).reasons
    print(json.dumps(against))


if __name__ == "__main__":
    main(sys.argv[1:])
