"""Content-addressed directories: scanned, shipped by content, laid out, selected from, and returned, within limits.

Upload: `scan` (with `ignore_rules` and `secret_files`) makes a manifest and fills a content store; the other side
answers with the digests it lacks, receives those, and `tree_writer.materialize` lays the directory out. Download:
`file_selection` lists matching files, `file_return` writes them.

Belongs here: file systems and the data that travels between them. Does not belong here: transport and timing.
All of it blocks on disks: call it from a thread or a process of its own, not from an event loop.
"""
