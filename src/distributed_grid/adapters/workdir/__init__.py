"""A job's files on their way to another machine and back: by content, within limits, never outside a directory.

There: `scan` (with `ignoring`) makes a manifest and fills a blob store; the other side says which blobs are `missing`,
gets those, and `lay_out` makes the job's directory of them. Back: `collect` lists what matches, `Receiver` writes it.

Belongs here: file systems and what travels between them. Does not belong here: how it travels, and when.
Everything here waits for disks: call it from a thread or a process of its own, not from an event loop.
"""

from distributed_grid.adapters.workdir.content_store import ContentMissing, ContentStore, ContentWriter
from distributed_grid.adapters.workdir.directory_walker import open_inside, open_root
from distributed_grid.adapters.workdir.file_selection import Collected, Wanted, collect
from distributed_grid.adapters.workdir.manifest import (
    Manifest,
    ManifestEntry,
    decode,
    decode_listing,
    encode,
    encode_listing,
)
from distributed_grid.adapters.workdir.materializer import Materialized, lay_out
from distributed_grid.adapters.workdir.paths import shown, to_bytes, to_text
from distributed_grid.adapters.workdir.receiver import Receiver
from distributed_grid.adapters.workdir.scan import Scan, scan
from distributed_grid.adapters.workdir.survey import Skipped

__all__ = [
    "Collected",
    "ContentMissing",
    "ContentStore",
    "ContentWriter",
    "Manifest",
    "ManifestEntry",
    "Materialized",
    "Receiver",
    "Scan",
    "Skipped",
    "Wanted",
    "collect",
    "decode",
    "decode_listing",
    "encode",
    "encode_listing",
    "lay_out",
    "open_inside",
    "open_root",
    "scan",
    "shown",
    "to_bytes",
    "to_text",
]
