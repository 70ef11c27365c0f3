"""Masking of secrets in shown command lines: the one list of names, token shapes and program options.

`command_line.mask_secrets` is for the words of a command, `mask_text` for one text, `shown_command` for a line that a
person reads. Pure: no clock, no I/O. Masking of known credentials (those of providers) is
`server/workers/provider_registry.py`.
"""
