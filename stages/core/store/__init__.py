"""The store: a folder of immutable versions. Read with `versions`, write with `writer`.

Words of the store:

    object       a file of the store; its key is its name below the store's folder
    run key      the hash of a stage's config and inputs: equal keys, equal work (`plan`)
    shard        consecutive rows of a version in one Arrow file; a killed stage loses at most the
                 unfinished ones, and processes that share a stage divide them
    attempt      one try to make a version; numbered by how many versions have its run key already
    worker       one of the processes that do the same work; its name is random
    torn         cannot be read whole: a manifest, a note
    note         a small object of unfinished work, such as the one that makes a shard count: what
                 is noted is known to the next process too
    mark         an object beside a version which says that its data may be deleted, and why
    expired      has the mark `expired`; the manifest stays, and proves that the work is done
    visible      neither expired nor removed
    repeat       a version with the run key and content of an earlier one, whose data were gone
    lease        the right of one process to do some work, until another process takes the lease

This file only re-exports names of `versions`.
"""

from .versions import Store, Version, schema_module

__all__ = ["Store", "Version", "schema_module"]
