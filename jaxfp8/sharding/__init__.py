"""Where arrays lie, and what has to be combined across devices."""
