"""Model check of leases, pulls and loads of two engines: every order of events, up to bounds."""
