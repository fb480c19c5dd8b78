"""Engine process without a model that fails on command. See ``__main__``."""
