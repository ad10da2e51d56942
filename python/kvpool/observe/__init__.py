"""What there is to see of pools: which live, who holds what in them, maps of that, and their numbers."""
