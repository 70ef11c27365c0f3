"""Prediction from earlier measurements: load of the next hours, size of a pool of workers.

Everything here is pure: no clock, no input or output; what has been measured comes in as an argument.
"""
