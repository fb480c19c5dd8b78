"""The failure matrix: requests, expected answers, failures of engines, and the table of results."""
