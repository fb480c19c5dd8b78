"""EngineCore: schedules and executes requests of one model on one device."""

import os

# Set this before torch is imported, because torch's OpenMP reads it then. Idle threads then spin for microseconds
# before they sleep. By default they spin for milliseconds, on cores that the kernels' threads, the frontend and clients
# need. With the default, steps of two rows and more took a third longer, and at load 7 the machine almost came to a
# halt.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
