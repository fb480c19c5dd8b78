"""``penstock serve``: flags, the plan of processes, devices and ports, and the supervisor that keeps them running."""
