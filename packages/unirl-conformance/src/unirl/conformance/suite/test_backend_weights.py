"""Exported weights, and that they are those the model runs with."""

from __future__ import annotations

from contextlib import suppress

import torch
from unirl.conformance.claims import claim
from unirl.conformance.doubles.plain_training import velocity_of, with_adapters
from unirl.conformance.doubles.trainer import largest_gap
from unirl.conformance.fixtures.backend import GRADIENT, BackendCase
from unirl.core.errors import RunFailed
from unirl.core.roles import Policy
from unirl.core.types.weights import checksum


@claim("backend")
def test_exported_names_are_those_of_the_plain_module(case: BackendCase) -> None:
    """Full and merged weights have exactly the names and shapes of the module before the backend wrapped it.

    If it fails: strip what wrapping and adapters put into names (`module.`, `_orig_mod.`, `.base_layer.`), leave
    adapter weights out of merged ones, and gather shards.
    """
    for training in case.trainings:
        with case.backend(training) as trainer:
            trainer.train(case.track())
            tensors = trainer.backend.export_weights(kind="full" if training == "full" else "merged").tensors
        result = {name: tuple(value.shape) for name, value in tensors.items()}
        expected = {name: tuple(value.shape) for name, value in trainer.plain.items()}
        strange = sorted(result.items() ^ expected.items())
        assert not strange, f"{training}: names and shapes differ from the plain module, such as {strange[0]}"


@claim("backend")
def test_weights_carry_version_kind_and_checksum(case: BackendCase) -> None:
    """Exported weights carry their version and a checksum, so a receiver can identify and verify them.

    If it fails: give the number of optimizer steps as `version`, and `unirl.core.types.weights.checksum` of the very
    tensors that are handed out.
    """
    for training in case.trainings:
        kinds = ("full",) if training == "full" else ("lora", "merged")
        with case.backend(training, *case.extras(training), **GRADIENT) as trainer:
            sums = set[str]()
            for steps in range(2):
                for kind in kinds:
                    update = trainer.backend.export_weights(kind=kind)
                    assert (update.kind, update.version) == (kind, steps), (
                        f"{kind!r} weights after {steps} steps say that they are {update.kind!r}, version "
                        f"{update.version}"
                    )
                    expected = checksum(update.tensors)
                    assert update.checksum == expected, (
                        f"{kind!r}: the checksum is {update.checksum!r}, not {expected!r}"
                    )
                    sums.add(expected)
                trainer.train(case.track())
        assert len(sums) >= 2, f"{training}: the checksum is the same after an update"


@claim("backend")
def test_weights_are_copies(case: BackendCase) -> None:
    """Exported tensors are copies: further training does not change them, and changing them does not affect training.
    An update whose tensors are made when they are asked for never gives newer ones than its version says.

    If it fails: look for a `detach()` without `clone()`, or a `state_dict()` handed out as it is; and raise a RunFailed
    for a tensor that is asked for after its policy has moved on.
    """
    for training in case.trainings:
        with case.backend(training, **GRADIENT) as trainer:
            for kind in ("full",) if training == "full" else ("lora", "merged"):
                update = trainer.backend.export_weights(kind=kind)
                made = dict(update.tensors)
                kept = {name: tensor.clone() for name, tensor in made.items()}
                trainer.train(case.track())
                assert largest_gap(made, kept) == 0, f"an update changed {kind!r} weights of before"
                with suppress(RunFailed):
                    later = dict(update.tensors)
                    assert largest_gap(later, kept) == 0, f"{kind!r} weights of version {update.version} are newer ones"
                trained, before = trainer.trained(), trainer.velocity()
                for tensor in trainer.backend.export_weights(kind=kind).tensors.values():
                    tensor.zero_()
                is_same = torch.equal(trainer.velocity(), before) and largest_gap(trainer.trained(), trained) == 0
                assert is_same, f"setting exported {kind!r} weights to 0 changed what trains"


@claim("backend")
def test_exported_weights_are_those_in_use(case: BackendCase) -> None:
    """Under each policy the model's outputs equal those of the plain module with that policy's exported weights:
    rollouts that share the module and engines that receive weights see the same policy.

    If it fails: look for training on a copy of the module, for weights that are kept twice (masters, gathered shards)
    with one of them stale, and for a policy that is switched in one place only.
    """
    for training in case.trainings:
        with case.backend(training, *case.extras(training), **GRADIENT) as trainer:
            for number in range(2):
                trainer.train(case.track(number))
                trainer.backend.end_rollout()
            scale = trainer.backend.export_weights(kind=training).adapter_scale
            # The reference is the initial module and has separate claims.
            policies: list[Policy] = ["live", *(policy for policy in trainer.policies if policy != "reference")]
            for policy in policies:
                with trainer.backend.policy(policy):
                    result = trainer.velocity()
                trained = trainer.trained(policy)
                weights = trained if training == "full" else with_adapters(trainer.plain, trained, scale=scale)
                expected = trainer.velocity(velocity_of(case.model(), weights))
                gap = float((result - expected).abs().max() / expected.abs().max())
                # W x + s B (A x) against (W + s B A) x: fp32 rounding through four layers.
                case.record(f"{training}, {policy}: relative gap of the velocity", gap, bound=1e-5)


@claim("backend")
def test_trainable_weights_are_fp32(case: BackendCase) -> None:
    """Trainable parameters are fp32 whatever the checkpoint's dtype: in bf16 small steps would be rounded away.

    If it fails: cast what trains (all weights, or the adapters) to fp32 before the optimizer is made.
    """
    for training in case.trainings:
        model = case.model()
        model.net.to(torch.bfloat16)
        with case.backend(training, model=model) as trainer:
            dtypes = {str(value.dtype) for value in trainer.trained().values()}
        assert dtypes == {"torch.float32"}, f"{training}: of a bf16 model, {', '.join(sorted(dtypes))} trains"
