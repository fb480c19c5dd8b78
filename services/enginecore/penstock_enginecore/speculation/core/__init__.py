"""Choice of the number of tokens to draft and to verify, from the measured time of steps and the fraction of drafts
that the model accepts.
"""
