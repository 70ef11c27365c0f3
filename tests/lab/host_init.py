"""Process 1 of a lab host: buries the dead until its standard input ends; with it ends everything in the host."""

import os
import signal


def bury(*_: object) -> None:
    """Take in every child that has ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


signal.signal(signal.SIGCHLD, bury)
bury()
while os.read(0, 64):
    pass
