"""How many tokens to draft and to verify, by what steps cost and how many drafts were accepted."""
