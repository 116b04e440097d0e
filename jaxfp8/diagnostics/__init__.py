"""Looking at what happened."""
