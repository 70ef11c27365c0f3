"""The single writer of the ledger, its end of every agent, and the views of its rows."""
