"""A model's forward pass over many rollouts at once, for training and for logprobs."""
