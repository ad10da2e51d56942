"""`kvpool plan`: how many tokens and requests of a model fit into memory."""
