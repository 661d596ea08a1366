"""Pictures in prompts: whether bytes are a picture, and what a model reads of one."""
