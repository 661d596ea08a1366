"""Chat messages to token ids: sandboxed templates, and text that cannot forge control ids."""
