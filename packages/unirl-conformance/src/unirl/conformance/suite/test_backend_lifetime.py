"""Releasing memory between updates, and shutdown."""

from __future__ import annotations

import torch.distributed as dist
from unirl.conformance.claims import claim
from unirl.conformance.doubles.trainer import largest_gap
from unirl.conformance.fixtures.backend import BackendCase


@claim("backend")
def test_offload_and_onload_keep_every_number(case: BackendCase) -> None:
    """Releasing device memory between updates, as runs do while an engine samples, does not change training by a bit.

    If it fails: move the moments and averages with the weights, keep their dtypes, and keep the optimizer's state keyed
    by the parameters that it has after the move.
    """
    for training in case.trainings:
        caps = case.extras(training)
        with case.backend(training, *caps) as trainer, case.backend(training, *caps) as twin:
            for number in range(2):
                for one in (trainer, twin):
                    one.train(case.track(number))
                    one.backend.end_rollout()
                trainer.backend.offload()
                trainer.backend.onload()
            gap = largest_gap(trainer.everything(), twin.everything())
            case.record(f"{training}: gap of the weights", gap, bound=0.0)
            gap = float((trainer.velocity() - twin.velocity()).abs().max())
            case.record(f"{training}: gap of the velocity", gap, bound=0.0)


@claim("backend")
def test_a_backend_may_be_closed_twice(case: BackendCase) -> None:
    """Closing is idempotent, and a closed backend leaves no process group behind.

    If it fails: make `close` remember that it was called, and end only the process group that the backend made.
    """
    had_group = dist.is_initialized()
    with case.backend(case.trainings[0]) as trainer:
        trainer.train(case.track())
        trainer.backend.close()
    assert dist.is_initialized() == had_group, "a process group is left behind"
