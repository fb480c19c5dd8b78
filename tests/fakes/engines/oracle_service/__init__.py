"""Engine process that is real except for its executor, and needs no torch. See ``__main__``."""
