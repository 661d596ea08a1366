"""Child processes: start, limit, ask and end them, with all that they start."""
