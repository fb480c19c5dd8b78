"""Logic of a data-parallel rank: state machine, driver, and links to other ranks."""
