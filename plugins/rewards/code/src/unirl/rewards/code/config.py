"""Settings of the reward `unit-tests`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.part_config import RewardConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["UnitTestsConfig"]


@dataclass
class UnitTestsConfig(RewardConfig):
    score: str = one_of("share", "all", default="share")
    """`share` of the tests passed, or 1 if `all` pass, else 0; `all` stops at the first test that does not."""
    isolation: str = one_of("namespaces", "command", "none", default="namespaces")
    """Isolation of the code: `namespaces` of Linux, a `command` that starts the sandbox, or `none`: resource limits
    alone, so that the code can read and write your files."""
    network: str = one_of("isolated", "unisolated", default="isolated")
    """`isolated` refuses to start where the code could reach a network. `unisolated` accepts that."""
    command: list[str] = field(default_factory=lambda: list[str]())
    """With `isolation: command`: the words before the interpreter's arguments, such as those of `docker run -i ...
    IMAGE python3` or `bwrap ... python3`; it must pass on stdin and stdout."""
    packages: bool = False
    """Also let the code import the packages installed beside UniRL, such as numpy; otherwise the standard library."""
    workers: int = limit(4, least=1, most=1024)
    """Samples tested at the same time."""
    cpu_s: int = limit(5, least=1)
    """CPU seconds per test, of all its threads together; what takes longer is killed by the kernel."""
    wall_s: float = limit(20.0, above=0)
    """Seconds per test, then its processes are killed."""
    sample_wall_s: float = limit(300.0, above=0)
    """Seconds per sample; tests that have not ended by then count as timed out."""
    memory_mb: int = limit(1024, least=64)
    """Address space of the code, and of the process that judges it, in units of 1024 x 1024 bytes."""
    disk_mb: int = limit(64, least=1)
    """Largest file, and with namespaces the whole of the sample's files, which are in memory."""
    output_kb: int = limit(1024, least=1)
    """Most output per test, and largest result of a call, in units of 1024 bytes."""
    processes: int = limit(16, least=1)
    """Most threads of a test at once; the code starts no processes. Not enforced for root, except with namespaces."""
    files: int = limit(64, least=16, most=4096)
    """Most open files of a process."""
    tolerance: float = limit(0.0, least=0, below=1)
    """For outputs and results of calls: allowed difference of numbers, as a share of the expected one, or absolute
    below 1."""

    def named_code(self) -> Mapping[str, str | Path]:
        """The command; and without isolation, the tests of the prompts."""
        if self.command:
            return {".command": f"the command {' '.join(map(str, self.command))!r}"}
        return (
            {".isolation": "tests of the prompts, and completions, without a sandbox"}
            if self.isolation == "none"
            else {}
        )

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Settings of another isolation, and isolation by resource limits alone that is not asked for in full."""
        if bool(self.command) != (self.isolation == "command"):
            text = f"got {self.command!r} with isolation={self.isolation}, expected words with isolation=command alone."
            yield Reason(key=".command", text=text)
        if self.isolation == "none" and self.network != "unisolated":
            yield Reason(
                key=".isolation",
                text="got none, which leaves the code your network and your files; to accept that, also set "
                "network=unisolated.",
            )
