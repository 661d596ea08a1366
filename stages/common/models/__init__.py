"""Models on disk and in memory: checkpoints, folders, loading."""
