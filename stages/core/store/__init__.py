"""The store: a folder of immutable versions. Read with `versions`, write with `writer`.

Words of the store:

    object       a file of the store; its key is its name below the store's folder
    attempt      one try to make a version; numbered by how many versions have its run key already
    torn         cannot be read whole: a manifest, a note
    noted        written down in a note, so that another process knows it: a finished shard
    mark         an object beside a version which says that its data may be deleted, and why
    expired      has the mark `expired`; the manifest stays, and proves that the work is done
    lease        the right of one process to do some work, until another process takes the lease

Not of the spine: this file only re-exports names of `versions`.
"""

from .versions import Store, Version, schema_module

__all__ = ["Store", "Version", "schema_module"]
