"""Importing the weights of another backend, as a dedicated rollout worker does before it samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from unirl.conformance.claims import claim
from unirl.conformance.doubles.trainer import largest_gap
from unirl.conformance.fixtures.backend import BackendCase, refuses
from unirl.core.errors import EchoMismatch
from unirl.core.roles import WeightUpdate
from unirl.core.types.weights import checksum


@claim("backend")
def test_adopted_weights_compute_what_the_trainer_computes(case: BackendCase) -> None:
    """A backend that never trained imports the weights of another one and then has the same weights, version and
    velocities; its reference policy stays the initial model.

    If it fails: write into the tensors that the module runs with, set the version, and see that an adapter has the same
    scale on both sides.
    """
    for training in case.trainings:
        caps = case.extras(training)
        with case.backend(training, *caps) as trainer, case.backend(training, *caps, seed=9) as other:
            for number in range(2):
                trainer.train(case.track(number))
            other.backend.adopt(trainer.backend.export_weights(kind=training))
            versions = (other.backend.version, trainer.backend.version)
            assert versions[0] == versions[1], f"{training}: version {versions[1]} was adopted as {versions[0]}"
            case.record(f"{training}: gap of the weights", largest_gap(other.trained(), trainer.trained()), bound=0.0)
            gap = float((other.velocity() - trainer.velocity()).abs().max())
            case.record(f"{training}: gap of the velocity", gap, bound=0.0)
            if "reference" in other.policies:
                gap = largest_gap(other.whole("reference"), other.plain)
                case.record(f"{training}: gap of the reference to the initial model", gap, bound=0.0)


@claim("backend")
def test_weights_that_do_not_fit_are_not_adopted(case: BackendCase) -> None:
    """Names that are unknown or missing, another shape and another dtype are rejected, and change nothing.

    If it fails: compare with `unirl.core.types.weights.weight_mismatch` before the first tensor is written.
    """
    for training in case.trainings:
        with case.backend(training) as trainer, case.backend(training, seed=9) as other:
            trainer.train(case.track())
            for what, update in _misfits(trainer.backend.export_weights(kind=training)).items():
                before, version = other.trained(), other.backend.version
                with refuses(EchoMismatch, f"{training}: an update with {what}"):
                    other.backend.adopt(update)
                is_same = largest_gap(other.trained(), before) == 0 and other.backend.version == version
                assert is_same, f"{training}: an update with {what} is refused, and changed weights or version"


def _misfits(good: WeightUpdate) -> dict[str, WeightUpdate]:
    """Fault -> the update. The wrong tensor is the last by name: those before it would have been written."""
    tensors = dict(sorted(good.tensors.items()))
    last = max(tensors)
    rest: Mapping[str, torch.Tensor] = {name: value for name, value in tensors.items() if name != last}
    wrong = {
        "every name under another prefix": {f"module.{name}": value for name, value in tensors.items()},
        "a name that is unknown": {**tensors, f"{last}.more": tensors[last]},
        "a tensor left out": rest,
        "a tensor of another shape": {**rest, last: tensors[last][None]},
        "a tensor of another dtype": {**rest, last: tensors[last].to(torch.bfloat16)},
    }
    return {what: dataclasses.replace(good, tensors=t, checksum=checksum(t)) for what, t in wrong.items()}
