"""The store: a folder of immutable versions. Read with `versions`, write with `writer`.

Not of the spine: this file only re-exports names of `versions`.
"""

from .versions import Store, Version, schema_module

__all__ = ["Store", "Version", "schema_module"]
