"""Every mixture of experts over several ranks."""
