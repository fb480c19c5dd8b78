"""An engine process that is real but for its executor, and needs no torch. See ``__main__``."""
