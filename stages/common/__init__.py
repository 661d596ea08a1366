"""What every stage stands on: config, store, files, checkpoints, models, ragged tensors, child
processes."""
