"""The store: a folder of immutable versions. Read with `versions`, write with `writer`.

Words of the store:

    object       a file of the store; its key is its name below the store's folder
    run key      the hash of a stage's config and inputs: equal keys, equal work (`plan`)
    shard        consecutive rows of a version in one Arrow file; a killed stage loses at most the
                 unfinished ones, and processes that share a stage divide them
    repetition   how often the work was done before: the number of versions with its run key; all
                 processes that do or resume the work have the same
    worker       one of the processes that do the same work; its name is random
    torn         cannot be read whole: a manifest, a note
    note         a small object of unfinished work, such as the one that makes a shard count: what
                 is noted is known to the next process too (`Plan.note`, in a manifest, has the
                 user's words)
    mark         an object beside a version which says that its data may be deleted, and why
    expired      has the mark `expired`; the manifest stays, and proves that the work is done
    published    there for every reader: its manifest is written
    visible      published, and neither expired nor removed
    listing      one look at a kind: `numbers` of all versions, `visible` ones, those with a run key
                 (`find`), and the numbers that are never given again (`given`)
    repeat       a version with the run key and content of an earlier one, whose data were gone
    lease        the right of one process to do some work, until another process takes the lease

This file only re-exports names of `versions`.
"""

from .versions import Store, Version, schema_module

__all__ = ["Store", "Version", "schema_module"]
