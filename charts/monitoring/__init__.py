"""Grafana dashboard that the chart installs."""
