"""Scheduling: offers, placement, queue, preemption, rebalancing. README.md draws the pipeline.

Everything here is pure: it reads the ledger, gets the time as an argument, and returns what should be done.
"""
