"""Offers: what a node lends, from its measurements."""
