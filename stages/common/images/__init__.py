"""Pictures in prompts: checking, decoding, and conversion to a model's inputs."""
