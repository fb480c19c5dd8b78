"""Forward passes: transformers' modules as reference, and faster decoders. ``build.py`` chooses one and checks its results."""
