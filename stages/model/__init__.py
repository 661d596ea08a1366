"""Models on disk and in memory: checkpoints, loading, chat templates, pictures, forward passes."""
