"""One HTML file about a whole run: read-only, self-contained, the same bytes for the same store."""
