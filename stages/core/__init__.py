"""Code shared by all stages: config, user code, the store, the runner, processes, the sandbox."""
