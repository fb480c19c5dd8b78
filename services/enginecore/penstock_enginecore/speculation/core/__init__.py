"""Choice of the number of tokens to draft and to verify, from the cost of steps and the acceptance of drafts."""
