"""Episodes of several turns: how they are played, and the text between two turns."""
