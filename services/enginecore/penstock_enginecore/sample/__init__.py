"""Samplers: rules of a request, filters, random draws, penalties, log-probabilities, verification of drafts."""
