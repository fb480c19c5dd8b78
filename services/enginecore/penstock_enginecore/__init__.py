"""EngineCore: schedules and executes requests of one model on one device."""

import os

# Before torch is imported, whose OpenMP reads it then: its idle threads spin for microseconds, then sleep. By default they
# spin for milliseconds, on cores that the kernels' threads, the frontend and clients want: steps of two rows and more took a
# third longer, and at load 7 everything came almost to a halt.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
