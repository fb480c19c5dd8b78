"""Management of recurrent states without torch: slots, kept states and pool sizes."""
