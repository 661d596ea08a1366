"""A package, so that conftest.py is one module for pytest and for those who import it, with one
Prefect server."""
