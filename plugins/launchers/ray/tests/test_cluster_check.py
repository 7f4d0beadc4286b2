"""What the pre-flight check of a cluster concludes from what its machines say, without a cluster."""

from __future__ import annotations

import dataclasses

import pytest
from unirl.launchers.ray.cluster_check import clock_offset, differences, odd_drivers
from unirl.launchers.ray.machine_probe import Machine, driver_version, installed_dists

GIB = 2**30


def machine(name: str, **facts: object) -> Machine:
    import platform

    healthy = Machine(
        name=name,
        address="10.0.0.1",
        python=platform.python_version(),
        dists=installed_dists(),
        cpus=8.0,
        gpus=0.0,
        devices=(),
        driver="",
        shared_memory_bytes=16 * GIB,
        clock_offset_s=0.0,
        port=1,
    )
    return dataclasses.replace(healthy, **facts)


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (100.3, 0.0),  # between the question and the answer: nothing is known to be off
        (107.0, 6.0),  # an answer at 101 cannot come from a clock that is right
        (90.0, -10.0),
    ],
)
def test_a_clock_is_off_by_what_the_time_of_the_answer_cannot_explain(there: float, expected: float) -> None:
    assert clock_offset(there, before=100.0, after=101.0) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n", "535.129.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n", "570.86.15"),
        ("", ""),
    ],
)
def test_the_version_of_the_driver_is_read(text: str, expected: str) -> None:
    assert driver_version(text) == expected


def test_a_machine_like_this_one_has_no_differences() -> None:
    assert list(differences(machine("a"), installed_dists())) == []


@pytest.mark.parametrize(
    ("facts", "check", "text"),
    [
        ({"python": "3.9.1"}, "version", "machine a runs Python 3.9.1"),
        ({"gpus": 8.0}, "device", "machine a offers 8 GPUs to Ray; torch finds no CUDA device there"),
        ({"clock_offset_s": -30.0}, "clock", "machine a: its clock is 30 s behind this one's"),
        ({"shared_memory_bytes": 64 * 2**20}, "memory", "machine a: /dev/shm has 64 MiB"),
        ({"dists": {**installed_dists(), "torch": "1.0"}}, "version", "machine a: torch "),
    ],
)
def test_each_difference_is_named(facts: dict[str, object], check: str, text: str) -> None:
    (finding,) = differences(machine("a", **facts), installed_dists())
    assert (finding.check, finding.text[: len(text)]) == (check, text)


def test_a_machine_with_another_driver_than_most_is_named() -> None:
    machines = [machine(name, driver="570.86.15") for name in "abc"]
    assert list(odd_drivers(machines)) == []
    # Machines without GPUs have no driver.
    odd = [*machines, machine("odd", driver="535.129.03"), machine("head")]
    (finding,) = odd_drivers(odd)
    assert finding.text == "machine odd has NVIDIA driver 535.129.03, most have 570.86.15; install that."
