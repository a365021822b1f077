"""`outrider-operator`. What takes time to import is imported late."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """command.run() of the command line; 0, too, after SIGTERM or SIGINT while it is imported, where nothing is held
    yet: that takes a second, many under a small CPU limit, and PID 1 ignores signals that it does not ask for."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))

    from outrider_operator.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
