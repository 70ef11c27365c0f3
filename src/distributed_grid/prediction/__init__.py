"""Prediction from earlier measurements: load of the next hours, size of a pool of workers, memory that a run will need.

Everything here is pure: no clock, no input or output; what has been measured comes in as an argument. Memory: a caller
keeps one `MemorySizer` per type of task, gives it what each run used, and asks it before the next run starts. Nothing
in the control plane calls it yet.
"""
