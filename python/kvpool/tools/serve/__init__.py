"""`kvpool serve`: a small model served through the pools, and checked against the model alone."""
