"""States of recurrent layers: models whose layers have a recurrent state beside, or instead of, keys and values."""
