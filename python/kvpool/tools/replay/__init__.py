"""`kvpool replay`: a request trace over the pools, with every row of K and V checked."""
