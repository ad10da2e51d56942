"""Models of other packages on kvpool's pools: one module for each package, which it needs."""
