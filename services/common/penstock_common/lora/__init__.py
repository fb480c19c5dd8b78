"""The names of LoRA adapters: what registrations say, and how they become the same on every frontend."""
