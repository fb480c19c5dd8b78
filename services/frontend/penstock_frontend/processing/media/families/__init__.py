"""What each family of models makes of media, and where it puts them in a prompt."""
