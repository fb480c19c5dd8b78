"""Media as Python programs in the same process give them: PIL images, arrays, bytes, paths."""
