"""Functions in their own processes: a row that hangs, crashes or prints endlessly fails alone."""
