"""Monitoring of the nodes: usage history, trends, snapshots, alerts, scheduling metrics, Prometheus.

What is lent, and to whom, is the ledger's business: nothing here decides, and nothing here is stored. A node that
was not heard from is *unknown*: it counts neither as idle nor as full, raises no alert and clears none.
"""
