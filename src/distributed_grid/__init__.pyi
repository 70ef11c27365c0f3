from distributed_grid import aio as aio
from distributed_grid import errors as errors
from distributed_grid.errors import JobFailed as JobFailed
from distributed_grid.front import JobHandle as JobHandle
from distributed_grid.front import LeaseHandle as LeaseHandle
from distributed_grid.front import Result as Result
from distributed_grid.front import borrow as borrow
from distributed_grid.front import pool as pool
from distributed_grid.front import run as run
from distributed_grid.front import status as status
from distributed_grid.front import submit as submit

__version__: str
__all__ = [
    "JobFailed",
    "JobHandle",
    "LeaseHandle",
    "Result",
    "aio",
    "borrow",
    "errors",
    "pool",
    "run",
    "status",
    "submit",
]

def __dir__() -> list[str]: ...
