"""Changes that the coordinator makes in Kubernetes: deletion costs of pods, and the number of engines in a pool."""
