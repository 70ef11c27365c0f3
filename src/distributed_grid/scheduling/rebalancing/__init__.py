"""Rebalancing: which nodes are pressed, what they borrow, from whom."""
