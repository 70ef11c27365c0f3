"""Offers: what a node will lend, from what was measured."""
