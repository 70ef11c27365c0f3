"""Lets a plain Ray program use a boost. On the import path of the job's own Python: standard library and Ray only."""
