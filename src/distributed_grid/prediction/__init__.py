"""Prediction from earlier measurements: load of the next hours, size of a pool of workers, needs of a run.

Everything here is pure: no clock, no input or output; measurements are arguments. A `TaskPredictor`
knows one type of task (`task_shape` says which): its tiers are a `MemorySizer` each. `server/prediction/service.py`
keeps them.
"""
