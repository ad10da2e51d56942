"""`kvpool doctor`: what of kvpool can be used on this machine, and what to do about the rest."""
