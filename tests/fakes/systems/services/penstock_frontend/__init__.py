"""Replacement for the frontend. The command reads the settings of the real frontend before it starts this one."""

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)
