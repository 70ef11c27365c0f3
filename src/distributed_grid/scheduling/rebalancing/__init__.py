"""Rebalancing: pressure of nodes, loans between them, advice to move work."""
