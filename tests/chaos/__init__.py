"""Tests that kill, stop and restart services under load: the requests, the clients, and checks of the outcomes."""
