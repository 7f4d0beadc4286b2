"""Processes of trials: a failure is named with its traceback, a hang ends, and nothing that was started is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing import ProcessRaisedException
from unirl.conformance.doubles import two_ranks
from unirl.conformance.doubles.processes import MARK, marked
from unirl.conformance.doubles.transport_process import Setup, TransportProcess
from unirl.core.specs.config import TrainConfig
from unirl.core.specs.part_config import PartConfig

sys.path.insert(0, str(Path(__file__).parent))

CONFIG = PartConfig()


class Sleeper:
    """A transport that starts a program, in its process group or apart from it."""

    def __init__(self, *, apart: bool) -> None:
        self.address = subprocess.Popen(["sleep", "60"], start_new_session=apart).pid

    def keep(self, tensors: Any) -> Any:
        raise ValueError("no room")

    def close(self) -> None: ...


def sleeper(config: PartConfig, *, place: Any) -> Sleeper:
    return Sleeper(apart=False)


def sleeper_apart(config: PartConfig, *, place: Any) -> Sleeper:
    return Sleeper(apart=True)


def build_broken(config: PartConfig, **context: Any) -> Any:
    raise ValueError("no such colour")


def build_hanging(config: PartConfig, **context: Any) -> Any:
    time.sleep(60)


def job(build: str) -> two_ranks.Job:
    name = f"{Path(__file__).stem}:{build}"
    return two_ranks.Job(build=name, config=CONFIG, training="full", policies=(), train=TrainConfig(), tracks=((), ()))


@pytest.mark.slow
def test_a_rank_that_fails_is_named_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedException, match=r"Process \d terminated(?s:.*)ValueError: no such colour"):
        two_ranks.train_on_two_ranks([job("build_broken")], tmp_path)


def test_ranks_that_hang_are_named_and_killed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"^ranks \[0, 1\] of 2 did not finish within 0\.5 s"):
        two_ranks.train_on_two_ranks([job("build_hanging")], tmp_path, deadline_s=0.5)
    assert not multiprocessing.active_children()


def transport(build: str, folder: Path) -> TransportProcess:
    setup = Setup(build=f"{Path(__file__).stem}:{build}", config=CONFIG, run="trial")
    return TransportProcess("driver", setup, folder=folder, mark=f"trial-of-{build}")


def test_a_transport_process_is_killed_with_all_that_it_started_and_its_errors_keep_their_type(tmp_path: Path) -> None:
    with transport("sleeper", tmp_path) as driver:
        started = driver("address")
        # Between its fork and its start a program has no environment.
        end = time.monotonic() + 10
        while not (found := marked("trial-of-sleeper", within_s=0)) and time.monotonic() < end:
            time.sleep(0.05)
        assert found == [f"process {started} (sleep)"]
        with pytest.raises(ValueError, match="no room"):
            driver("keep", [])
    assert marked("trial-of-sleeper", within_s=10) == []


def test_a_program_that_left_its_group_is_still_found_by_the_mark(tmp_path: Path) -> None:
    with transport("sleeper_apart", tmp_path) as driver:
        left = driver("address")
    assert marked("trial-of-sleeper_apart", within_s=0.2) == [f"process {left} (sleep)"]
    os.kill(left, signal.SIGKILL)
    assert marked("trial-of-sleeper_apart", within_s=10) == []
    assert MARK not in os.environ


def test_a_transport_that_cannot_be_built_raises_its_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such colour"):
        transport("build_broken", tmp_path)
