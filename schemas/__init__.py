"""What travels between stages: one module a kind, each with its table, its SCHEMA and
`check(table)`."""
