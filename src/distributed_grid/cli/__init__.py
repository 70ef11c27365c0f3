"""The command line: one file per command group, each imported only when it is used.

Commands parse, ask the control plane, and show; they decide nothing.
"""
