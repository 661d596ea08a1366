"""What samples: vLLM, transformers, or a script."""
