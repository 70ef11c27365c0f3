"""Choosing: where a request goes, whom it displaces, and why it waits. Pure; README.md draws the pipeline.

Nothing here writes to the ledger, and nothing here knows the time except as an argument.
"""
