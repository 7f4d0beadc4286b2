"""A run whose process gets no more memory after its first step: `python short_memory.py SPARE_BYTES WORD...`.

The kernel then refuses to map more than SPARE_BYTES, so that the allocator of torch fails as it does on a full machine.
Set MALLOC_MMAP_THRESHOLD_, or the C library serves it from memory that it has kept.
"""

from __future__ import annotations

import resource
import sys
from functools import partial
from pathlib import Path

from small_runs import catalog, plan
from unirl.core.cli.output import print_error
from unirl.core.errors import UniRLError
from unirl.core.types.event import Event
from unirl.loop.run import train

__all__ = ["limit_memory"]


def limit_memory(event: Event, *, spare_bytes: int) -> None:
    """A listener that limits this process once its first step is saved."""
    if event.kind == "checkpoint_saved" and event.step == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + spare_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


if __name__ == "__main__":
    spare, *words = sys.argv[1:]
    try:
        limit = partial(limit_memory, spare_bytes=int(spare))
        train(plan(*words), catalog=catalog(), listeners=[limit], overrides=words)
    except UniRLError as error:
        print_error(error)
        sys.exit(error.exit_code)
