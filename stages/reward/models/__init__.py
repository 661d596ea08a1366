"""Reward models: conversations rendered by the model's own template, scored by transformers or
vLLM."""
