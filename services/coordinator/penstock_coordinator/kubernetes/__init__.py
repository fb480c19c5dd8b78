"""Changes of Kubernetes objects by the coordinator: deletion costs of pods, and the number of engines of a pool."""
