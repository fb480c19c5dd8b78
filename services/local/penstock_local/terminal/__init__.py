"""What commands write to a terminal and read from it."""
