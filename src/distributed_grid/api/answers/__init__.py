"""Answers of the control plane: one frozen struct each, whose fields are the documented JSON names.

They are built from rows and ledger by classmethods (`of`). Field names, once shipped, do not change. Amounts are in
cores, GPUs and GB; times are ISO 8601 in UTC, by the wall clock. A field that an answer may lack is `UNSET`.
"""
