"""The single writer of the ledger, the reconciler of effects, and the control plane's end of every agent."""
