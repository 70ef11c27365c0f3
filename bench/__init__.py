"""Measurements against a floor or a bar in the same run: `make bench`. Never part of the tests."""
