"""Code shared by all stages: config, store, files, models, ragged tensors, child processes."""
