"""How work is run: processes that end with all that they started."""
