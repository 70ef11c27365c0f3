"""Telling: the owner of the ledger, the client of it, and the façades with the guides' names.

A façade holds a Grid and a config and nothing else; what is alive is in the ledger only.
Importing this package must stay cheap: the command line does it at every start.
"""
