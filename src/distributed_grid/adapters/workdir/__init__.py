"""Working directories of jobs: shipped to a node by content, and fetched back, within limits.

Upload: `scan` (with `ignore_rules` and `secret_files`) makes a manifest and fills a content store; the other side says
which contents are missing, gets those, and `tree_writer.materialize` makes the job's directory. Download:
`file_selection` lists the files that match, `tree_writer.FileReceiver` writes them.

Belongs here: file systems and what travels between them. Does not belong here: transport and timing.
All of it blocks on disks: call it from a thread or a process of its own, not from an event loop.
"""
