"""Episodes of several turns: how one is played, and what stands between two turns."""
