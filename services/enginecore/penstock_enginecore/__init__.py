"""EngineCore: schedules and executes requests of one model on one device."""

import os

# Set this before torch is imported, because torch's OpenMP reads the variable during the import. With this value, idle
# threads spin for microseconds before they sleep. By default they spin for milliseconds, on cores that the kernels'
# threads, the frontend and clients need. With the default, steps of two or more rows took a third longer, and at a load
# average of 7 the machine almost came to a halt.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
