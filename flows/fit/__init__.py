"""Whether a recipe fits a machine, told from shapes before anything runs: memory of each stage,
bytes and products of an iteration, and seconds on paper."""
