"""Façades for Python programs, under the names and import paths that the guides promise.

A façade holds a config and a client of the control plane and nothing else: the ledger has all state.
"""
