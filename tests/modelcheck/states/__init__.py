"""Model check of the slots of recurrent states: every order of steps, ends and failures of a few requests."""
