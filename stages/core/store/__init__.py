"""The store: a folder of immutable versions. Read with `versions`, write with `writer`.

Words of the store:

    staging      the place of unfinished work: shards, notes, leases
    candidate    a complete version in staging, renamed to publish it
    torn         cannot be read whole: a manifest, a note
    noted        written down in a small file, so that another process knows it: a finished shard,
                 a version in ledger or index
    expired      deleted by age; the manifest stays in the ledger and proves that the work is done
    tombstone    the record that a version was deleted or expired, and why
    lease        the right of one process to do some work, until another process takes the lease
    stale        not renewed for a minute, said of a lease: another process may take it
    to hold      for a lease, to have taken it; for a version (`Store.hold`), to save it from being
                 deleted

Not of the spine: this file only re-exports names of `versions`.
"""

from .versions import Store, Version, schema_module

__all__ = ["Store", "Version", "schema_module"]
