"""Releasing memory between updates, and shutdown."""

from __future__ import annotations

import torch.distributed as dist
from unirl.conformance.claims import claim
from unirl.conformance.doubles.trainee import largest_gap
from unirl.conformance.fixtures.backend import BackendBench


@claim("backend")
def test_offload_and_onload_keep_every_number(bench: BackendBench) -> None:
    """Releasing device memory between updates, as runs do while an engine samples, does not change training by a bit.

    If it fails: move the moments and averages with the weights, keep their dtypes, and keep the optimizer's state keyed
    by the parameters that it has after the move.
    """
    for training in bench.trainings:
        caps = bench.extras(training)
        with bench.backend(training, *caps) as trainee, bench.backend(training, *caps) as twin:
            for number in range(2):
                for one in (trainee, twin):
                    one.train(bench.track(number))
                    one.backend.end_rollout()
                trainee.backend.offload()
                trainee.backend.onload()
            gap = largest_gap(trainee.everything(), twin.everything())
            bench.record(f"{training}: gap of the weights", gap, bound=0.0)
            gap = float((trainee.velocity() - twin.velocity()).abs().max())
            bench.record(f"{training}: gap of the velocity", gap, bound=0.0)


@claim("backend")
def test_a_backend_may_be_closed_twice(bench: BackendBench) -> None:
    """Closing is idempotent, and a closed backend leaves no process group behind.

    If it fails: make `close` remember that it was called, and end only the process group that the backend made.
    """
    had_group = dist.is_initialized()
    with bench.backend(bench.trainings[0]) as trainee:
        trainee.train(bench.track())
        trainee.backend.close()
    assert dist.is_initialized() == had_group, "a process group is left behind"
