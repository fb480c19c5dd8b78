"""Stands in for the enginecore. The command reads the real one's settings, before it starts this."""

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)
