"""Functions in worker processes: a row that hangs, crashes or prints endlessly fails alone."""
