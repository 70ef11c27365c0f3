"""Prediction in the daemon: recorded runs, trained predictors in their process, the sizes of jobs."""
