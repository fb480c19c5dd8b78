"""Logs, metrics, traces and incidents of every service."""
