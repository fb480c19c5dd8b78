"""Logic of a data-parallel rank: its state machine, driver and links."""
