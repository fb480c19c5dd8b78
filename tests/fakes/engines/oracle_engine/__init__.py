"""An engine without a model as a process of its own, that fails where it is told to. See ``__main__``."""
