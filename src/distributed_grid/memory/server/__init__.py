"""The memory server: one process per node that holds copies of blocks."""
