"""The phases of ``make bench-gpu``. Imports no torch.

Seconds are estimates for an H100 or H200 with the shape of Llama 3.1 8B. ``worth`` weighs the importance of a phase's
results. The forward pass runs first, because the other phases are compared with it. Then the phases with the fewest
results so far run.
"""

from tests.device.phases import ALWAYS, Phase

PHASES = [
    Phase("machine", "tests.benchmarks.gpu.machine:stages", seconds=4, step=ALWAYS),
    Phase("ceilings", "tests.benchmarks.gpu.ceilings:stages", seconds=8, step=1),
    Phase("compile", "tests.benchmarks.gpu.compiling:stages", seconds=45, step=1, isolated=True, host=True),
    Phase("kernels", "tests.benchmarks.gpu.kernels:stages", seconds=30, worth=6),
    Phase("sampling", "tests.benchmarks.gpu.sampling:stages", seconds=15, worth=5),
    Phase("products", "tests.benchmarks.gpu.products:stages", seconds=60, worth=10),
    Phase("passes", "tests.benchmarks.gpu.passes:stages", seconds=90, worth=20),
    Phase("lora", "tests.benchmarks.gpu.lora:stages", seconds=70, worth=7),
    Phase("engine", "tests.benchmarks.gpu.engine:stages", seconds=120, worth=10),
    Phase("mixtures", "tests.benchmarks.gpu.mixtures:stages", seconds=60, worth=9),
    Phase("mixed", "tests.benchmarks.gpu.mixed:stages", seconds=90, worth=12),
    Phase("invariant", "tests.benchmarks.gpu.invariant:stages", seconds=80, worth=6),
    Phase("checkpoint", "tests.benchmarks.gpu.checkpoint:stages", seconds=60, worth=8),
    Phase("tiles", "tests.benchmarks.gpu.products:tuning", seconds=240, worth=4),
    Phase("peers", "tests.benchmarks.gpu.peers:stages", seconds=60, worth=3),
]
