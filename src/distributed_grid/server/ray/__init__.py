"""The life of the Ray cluster: started over SSH or attached, reconciled with the ledger."""
