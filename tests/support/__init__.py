"""What others need to test against the grid: contract suites, and parts that stand in for real ones.

Belongs here: suites that every adapter of a port has to pass, builders, fakes that record, the laws that tests and the
simulator hold against a ledger. Does not belong here: anything the running grid imports.
"""
