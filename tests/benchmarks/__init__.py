"""What the project measures about itself. ``make bench`` runs it; nothing here is a test."""
