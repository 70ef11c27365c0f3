"""The REST door: HTTP in, the deeds of `server/services/jobs.py`, JSON out. One file per noun, and no decisions.

Everything here is imported when the first connection arrives, not before: it takes a second and 40 MB.
"""
