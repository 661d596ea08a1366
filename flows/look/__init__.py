"""Views of a store for people: text in the terminal, one HTML report, Prefect's pages."""
