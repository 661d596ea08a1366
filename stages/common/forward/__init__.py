"""A model's pass over many rollouts at once: for whoever trains on them or scores them again."""
