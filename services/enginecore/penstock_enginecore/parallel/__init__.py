"""Model parallelism: the split of a model over several devices, and the communication between its parts."""
