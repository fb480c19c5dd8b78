"""API keys and tokens: who calls, and for which tenant."""
