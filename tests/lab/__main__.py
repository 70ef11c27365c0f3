"""`python -m tests.lab [NAME…]`: a lab to play with, until Ctrl-C."""

from __future__ import annotations

import signal
import sys

from tests.lab.lab import NAMES, Lab, problem


def main(names: list[str]) -> int:
    """Open it, say how to get in, and close it when told to stop."""
    if reason := problem():
        print(reason, file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):  # in the background the latter is ignored unless asked for
        signal.signal(number, signal.default_int_handler)
    try:
        with Lab(int(names[0]) if names and names[0].isdigit() else names or NAMES) as lab:
            file = lab.folder / "cluster.yaml"
            file.write_text(lab.config())
            for host in lab:
                print(f"{host.name:12} {host.address:14} {lab.ssh_line(host)}")
            print(f"cluster file {file}; Ctrl-C ends the lab", flush=True)
            signal.pause()
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
