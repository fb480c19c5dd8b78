"""What the coordinator changes in Kubernetes: what pods cost to remove, and how many engines a pool has."""
