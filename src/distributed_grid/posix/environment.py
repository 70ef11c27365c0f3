"""Environment of this process: variables with credentials, variables that a child process inherits, the user's home.

The control plane gets the variables that its config names from its starter, in a file without a name: they are in no
list of processes, and no child has them.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
from collections.abc import Mapping

CREDENTIAL_PREFIXES = ("AWS_", "BOTO_", "GOOGLE_", "CLOUDSDK_")
"""The variables that the libraries of cloud providers read by themselves."""
LIBRARY_VARIABLES = {"aws": ("AWS_", "BOTO_"), "gcp": ("GOOGLE_", "CLOUDSDK_"), "slurm": ("SLURM_CONF",)}
"""Those that belong to each provider."""
MAX_BYTES = 1 << 20
_NAMED = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_private: set[str] = set()


def named_variables(config_text: str, environ: Mapping[str, str]) -> dict[str, str]:
    names = set(_NAMED.findall(config_text))
    return {name: value for name, value in environ.items() if name in names}


def variables_for(config_text: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a config names as `${NAME}`, and those of the libraries of the providers it names."""
    names = set(_NAMED.findall(config_text))
    prefixes = tuple(
        prefix
        for provider, variables in LIBRARY_VARIABLES.items()
        if re.search(rf"\b{provider}\b", config_text)
        for prefix in variables
    )
    return {name: value for name, value in environ.items() if name in names or (prefixes and name.startswith(prefixes))}


def pack_variables(variables: Mapping[str, str]) -> int:
    """The descriptor of a nameless file with these variables, for a child process that takes them."""
    descriptor = os.memfd_create("variables", 0)
    os.write(descriptor, json.dumps(dict(variables)).encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def take_variables(descriptor: int) -> None:
    """Have the variables in this file, which is closed; no child process inherits them."""
    with open(descriptor, "rb") as file:
        variables: dict[str, str] = json.loads(file.read(MAX_BYTES))
    _private.update(variables.keys() - os.environ.keys())
    os.environ.update({name: value for name, value in variables.items() if name in _private})


def child_environment() -> dict[str, str]:
    """The environment of this process without credentials."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _private and not name.startswith(CREDENTIAL_PREFIXES)
    }


def holds_home(directory: str | os.PathLike[str]) -> bool:
    """True if a directory is the user's home directory or above it, by whatever name it was reached."""
    try:
        status = os.stat(directory)
    except OSError:
        return False
    for home in home_directories():
        folder, above = home, os.path.dirname(home)
        while True:
            with contextlib.suppress(OSError):  # a home that does not exist: its parents may
                if os.path.samestat(os.stat(folder), status):
                    return True
            if above == folder:
                break
            folder, above = above, os.path.dirname(above)
    return False


def home_directories() -> tuple[str, ...]:
    """The user's home directories, as real paths: `$HOME` and that of the user database, each once."""
    named = [os.environ.get("HOME", "")]
    try:
        named.append(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # a user that the database does not have
        pass
    return tuple(dict.fromkeys(os.path.realpath(home) for home in named if os.path.isabs(home)))
