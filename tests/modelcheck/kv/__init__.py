"""Model check of KV leases, pulls and loads of two engines: all orders of events, up to bounds."""
