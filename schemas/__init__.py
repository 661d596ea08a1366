"""The data that travels between stages: one module per kind, with its table, SCHEMA and `check`."""
