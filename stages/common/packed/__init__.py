"""A causal model's pass over many rollouts in one row of tokens: for whoever trains on them or scores them again."""
