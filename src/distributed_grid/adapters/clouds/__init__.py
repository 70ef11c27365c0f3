"""Providers of workers: a file is one technology that machines, or containers, are started with.

Belongs here: calls of a provider's API, each with a time limit, translated to the values and errors of the port
(`CloudProviderBase` in `ports.py`). Does not belong here: the life of a worker, retries and budgets, which are the
reactor's. The libraries are imported when they are used first.
"""
