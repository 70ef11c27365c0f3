"""Work that was logged somewhere, as requests that can be made again. One file a format; `reading` finds out which.

What a format does not say (users, priorities, patience) is not made up: such work has one user, medium priority and
waits for as long as it takes.
"""

from distributed_grid.simulation.traces.format_detection import read_trace
from distributed_grid.simulation.traces.trace import LoggedJob, Trace

__all__ = ["LoggedJob", "Trace", "read_trace"]
