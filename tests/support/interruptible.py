"""`unirl` as a command that SIGINT interrupts.

Whoever runs the tests may ignore or block the signal, as `nohup` does, and a process that is started inherits that.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["interruptible"]

CODE = """\
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
from unirl.core.cli import main
main(sys.argv[1:])
"""


def interruptible(*words: str | Path) -> list[str]:
    """The words of a command for `subprocess`. words: after `unirl`."""
    return [sys.executable, "-c", CODE, *map(str, words)]
