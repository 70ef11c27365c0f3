"""Lend the idle parts of unequal machines as time-bounded leases, the owner of each machine first.

`run`, `submit`, `borrow`, `status` and `pool` use the grid from Python; `aio` has them as coroutines. Each is loaded on
its first use; type checkers read the stub beside this file.
"""

__version__ = "0.2.0"

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
_MODULES = {"aio": "", "errors": "", "JobFailed": "errors"}
"""Of the names above: modules, and the modules of those that are not in `front`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = _MODULES.get(name, "front")
    value = getattr(import_module(f"{__name__}.{module}"), name) if module else import_module(f"{__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
