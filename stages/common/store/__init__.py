"""The store: a folder of immutable versions. Reading is `versions`, writing is `writer`.

Not of the spine: it only hands on names of `versions`.
"""

from .versions import Store, Version, schema_module

__all__ = ["Store", "Version", "schema_module"]
