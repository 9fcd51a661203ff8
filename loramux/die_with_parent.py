"""Becomes a command that gets SIGTERM when the thread that started it ends, by whatever death.

    python die_with_parent.py PARENT_PID COMMAND [ARGUMENT...]

Run by path, so that nothing else is imported. The request survives exec; a hook between fork and exec would not be safe
in a parent with threads. Linux only; elsewhere it is exec and nothing more.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent_pid):  # it died before the request was made
            sys.exit(f"parent {parent_pid} is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
