"""The store: a folder of immutable versions. Reading is `versions`, writing is `writer`."""

from .versions import Store, Version, schema_module

__all__ = ["Store", "Version", "schema_module"]
