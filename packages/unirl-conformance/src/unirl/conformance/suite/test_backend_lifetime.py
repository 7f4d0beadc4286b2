"""Between the steps: giving memory back, and the end."""

from __future__ import annotations

import torch.distributed as dist
from unirl.conformance.benches.backend import BackendBench
from unirl.conformance.claims import claim
from unirl.conformance.workbench.trainee import largest_gap


@claim("backend")
def test_offload_and_onload_keep_every_number(bench: BackendBench) -> None:
    """Giving device memory back between updates, as runs do while an engine samples, changes no bit of the training.

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
    """A run that ends in an error may close what is closed already; and a closed backend leaves no process group.

    If it fails: make `close` remember that it was called, and end only the process group that the backend made.
    """
    had_group = dist.is_initialized()
    with bench.backend(bench.trainings[0]) as trainee:
        trainee.train(bench.track())
        trainee.backend.close()
    assert dist.is_initialized() == had_group, "a process group is left behind"
