"""Functions in worker processes: a row that hangs, crashes or prints without end costs itself
alone."""
