"""Indexes derived from the ledger's rows: what is free, claimed and running, per node."""
