"""`kvpool doctor`: what works on this machine and, for the rest, the reason and the remedy."""
