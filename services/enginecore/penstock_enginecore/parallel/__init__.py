"""Model parallelism: splits a model over several devices, and connects the workers with the parts."""
