"""Models on disk and in memory: checkpoints, model folders, and loading."""
