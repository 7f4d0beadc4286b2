"""The environments that engines run in."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner
from unirl.core.errors import RunFailed
from unirl.runtime.engine_host.command import command

__all__ = ["OUT_OF_REACH", "make"]

OUT_OF_REACH = re.compile(
    r"dns error|connect|timed? ?out|unreachable|no version of torch|name resolution", re.IGNORECASE
)
"""What uv and pip say when an index does not answer, or does not have torch for CPUs."""


def make(name: str, *, release: str = "") -> None:
    """The environment of an engine, of its newest release or another one, made by the command itself; there from then
    on, for everything with the same lock.

    Where the package index is out of reach, or has no torch for CPUs, the test is reported as not run. Anything else,
    such as a file that does not match its hash, fails.
    """
    done = CliRunner().invoke(command, [name, "--accel", "cpu", "--release", release])
    if done.exception is None:
        return
    if isinstance(done.exception, RunFailed) and OUT_OF_REACH.search(str(done.exception)):
        pytest.skip(f"not run: no environment for {name}: {done.exception}")
    raise done.exception
