"""Forward passes of models: one that runs transformers' modules, which is the reference, and faster decoders.
``build.py`` chooses a forward pass and compares the results with the results of the reference.
"""
