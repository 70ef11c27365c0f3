"""Indexes derived from the ledger's rows: free, claimed and running resources per node."""
