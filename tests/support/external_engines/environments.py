"""Environments of external engines."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner
from unirl.core.errors import RunFailed
from unirl.engine_host.command import command

__all__ = ["OUT_OF_REACH", "make"]

OUT_OF_REACH = re.compile(
    r"dns error|connect|timed? ?out|unreachable|no version of torch|name resolution", re.IGNORECASE
)
"""Messages of uv and pip when an index does not answer or has no CPU build of torch."""


def make(name: str, *, release: str = "") -> None:
    """The environment of an engine, for its newest or another release, created by the command itself and reused for the
    same lock.

    If the package index is unreachable or has no CPU build of torch, the test is reported as not run. Anything else,
    such as a wrong hash, fails.
    """
    done = CliRunner().invoke(command, [name, "--accel", "cpu", "--release", release])
    if done.exception is None:
        return
    if isinstance(done.exception, RunFailed) and OUT_OF_REACH.search(str(done.exception)):
        pytest.skip(f"not run: no environment for {name}: {done.exception}")
    raise done.exception
