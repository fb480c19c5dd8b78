"""What is done to requests and outputs in every protocol."""
