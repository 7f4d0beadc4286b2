"""Whole rounds of training: request, rollout, echo, score, advantages, update, and the next rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.fixtures.cell import LINEAR, CellCase, Training
from unirl.conformance.verdicts import NotApplicable
from unirl.core.specs.capability import Cap
from unirl.core.specs.config import TrainConfig
from unirl.core.types.batch import same
from unirl.loop.algorithm_state import algorithm_state, resume_algorithm
from unirl.loop.checkpoints import Checkpoints
from unirl.loop.parts import sync_weights

BATCHING_BOUND = 1e-4
"""Relative, in norm. fp32 sums in another order differ by about 1e-6, more where a gradient nearly cancels."""
ROUNDING = 1e-5
"""Relative, in norm: a term that is 0 changes no bit on the CPU, and no more than the order of sums on a GPU."""
CUDA_BOUND = 1e-3
"""Relative, in norm: kernels on a GPU may add in any order, and two steps amplify that. On the CPU it is 0."""


@claim("cell", needs={"backend": (Cap.TRAIN_LORA,), "model": (Cap.LORA,)}, track="any")
def test_a_round_trains_adapters(case: CellCase) -> None:
    """One round of the loop with these parts trains LoRA adapters: the rollout echoes its request, every number is
    finite, the weights change, and the version counts the update.

    If it fails: the phase that the message names is the part to look at; run the claims of that part alone first.
    """
    _round(case, "lora")


@claim("cell", needs={"backend": (Cap.TRAIN_FULL,)}, track="any")
def test_a_round_trains_all_weights(case: CellCase) -> None:
    """The same with all weights of the trainable module.

    If it fails while adapters train: look at what is frozen, at dtypes (what trains is fp32), and at how full weights
    reach the engine.
    """
    _round(case, "full")


@claim("cell", track="any")
def test_second_rollout_is_made_with_the_new_weights(case: CellCase) -> None:
    """After an update the engine samples from the new weights and reports their version: the same prompts and noise
    give other latents, completions or log-probs.

    If it fails: the engine holds a copy, a cache or a merged weight from before the update; look at `load_weights`, or,
    where it shares the module, at whoever replaced it.
    """
    with case.cell(lr=1e-2) as cell:
        before = cell.rollout(0)
        cell.train(cell.with_advantages(before))
        cell.backend.end_rollout()
        sync_weights(cell.parts, cell.plan)
        versions = cell.engine.version, cell.backend.version_of(cell.plan.only.needs.sampler)
        assert versions[0] == versions[1], f"the engine is at version {versions[0]}, the backend at {versions[1]}"
        after = cell.rollout(0)
        assert set(after.policy_version) == {versions[1]}, f"samples of version {set(after.policy_version)} came"
    if case.is_text:
        moved = float(not same((before.text.tokens, before.text.log_probs), (after.text.tokens, after.text.log_probs)))
    else:
        moved = float((after.latent.final.float() - before.latent.final.float()).abs().max())
        case.record("largest change of a latent", moved)
    assert moved > 0, "with the same noise, the rollout after the update is that of before"


@claim("cell", needs={"engine": (Cap.WEIGHTS_SHARED,)}, track="any")
def test_micro_batches_of_a_round_give_the_same_update(case: CellCase) -> None:
    """With this model, algorithm and backend, an update in micro-batches of unequal size equals that of the whole
    batch, up to fp32 rounding. Tried in process, since the engine does not matter.

    If it fails: a mean over a micro-batch somewhere: in the algorithm's terms, in how the backend adds up gradients, or
    in a model with cross-row interaction (batch norm).
    """
    updates: list[dict[str, Tensor]] = []
    track = None
    # Of 6 samples in groups of 3: 4 and 2.
    for micro_batch_size in (0, 4):
        with case.cell(train=TrainConfig(micro_batch_size=micro_batch_size), **LINEAR) as cell:
            before = cell.weights()
            track = track or cell.with_advantages(cell.rollout(0))
            cell.train(track)
            updates.append(_less(cell.weights(), before))
    case.record("relative gap in norm", _gap(updates[1], updates[0]), bound=BATCHING_BOUND)


@claim("cell", track="any")
def test_a_run_resumes_exactly(case: CellCase) -> None:
    """One step, a checkpoint, fresh parts that load it and another step give the weights of two uninterrupted steps,
    bit for bit on the CPU. An external engine batches requests as they arrive, so its samples, and the weights after
    them, agree up to fp32 rounding.

    If it fails: something that the second step depends on is not in the checkpoint: moments and counters of the
    optimizer, an average, the algorithm's `state`, or, in engine and model, a cache or a random state that lives from
    step to step.
    """
    checkpoints = Checkpoints(case.folder, keep=1)
    with case.cell(**{**LINEAR, "lr": 1e-2}) as cell:
        start = cell.weights()
        cell.run(0)
        cell.run(1)
        straight, version = cell.weights(), cell.backend.version
    with case.cell(**{**LINEAR, "lr": 1e-2}) as cell:
        cell.run(0)
        checkpoints.save(1, write=cell.backend.save, state=algorithm_state(cell.parts.only.algorithm))
    with case.cell(**{**LINEAR, "lr": 1e-2}) as cell:
        saved = checkpoints.load()
        cell.backend.load(saved.backend_folder(""))
        resume_algorithm(cell.parts.only.algorithm, saved.state, folder=saved.folder)
        cell.run(1)
        resumed = cell.weights()
        assert cell.backend.version == version, f"version {cell.backend.version}, at a stretch {version}"
    on_cpu = 0.0 if case.is_in_process else BATCHING_BOUND
    bound = on_cpu if case.device == "cpu" else CUDA_BOUND
    case.record("relative gap in norm", _gap(_less(resumed, start), _less(straight, start)), bound=bound)


@claim("cell", needs={"engine": (Cap.WEIGHTS_SHARED,)}, track="any")
def test_options_on_other_policies_change_the_loss(case: CellCase) -> None:
    """Where a setting of the algorithm brings in a reference or lagged policy, such as a KL coefficient, training
    differs with and without it from the second round on: in the first the policies are still the same. Tried in
    process, since the engine does not matter.

    If it fails: the backend gives the live weights for the other policy, or the algorithm leaves the term out.
    """
    options = case.options_with_policies()
    if not options:
        raise NotApplicable(f"no setting of algorithm {case.algorithm.name!r} needs a policy besides the live one")
    plain = _after_two_rounds(case, {})
    for option in options:
        start, result = _after_two_rounds(case, option)
        gap = _gap(_less(result, start), _less(plain[1], plain[0]))
        case.record(f"relative change by {next(iter(option))}", gap)
        assert gap > ROUNDING, f"{option} changes nothing: the update differs by {gap:.2g} of its size"


def _after_two_rounds(case: CellCase, options: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before and after."""
    with case.cell(options=options, **LINEAR) as cell:
        start = cell.weights()
        for step in range(2):
            cell.run(step)
        return start, cell.weights()


def _less(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value - other[name] for name, value in one.items()}


def _round(case: CellCase, training: Training) -> None:
    with case.cell(training) as cell:
        version, before = cell.backend.version, cell.weights()
        metrics = cell.run(0)
        after = cell.weights()
        wild = {key: value for key, value in metrics.items() if not math.isfinite(value)}
        assert not wild, f"numbers of the round are not finite: {wild}"
        assert metrics["updates"] >= 1, f"no update was made: {metrics['updates_skipped']:g} were skipped"
        result = cell.backend.version - version
        assert result == metrics["updates"], f"{metrics['updates']:g} updates raised the version by {result}"
    assert after.keys() == before.keys(), "the names of the weights changed"
    broken = [name for name, value in after.items() if not bool(torch.isfinite(value).all())]
    assert not broken, f"weights are not finite, the first is {broken[0]}"
    changed = sum(not torch.equal(value, before[name]) for name, value in after.items())
    case.record("tensors that changed", changed)
    assert changed, f"none of {len(after)} tensors changed"


def _gap(result: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """|result - expected| / |expected| over all tensors."""
    assert result.keys() == expected.keys(), "the two have weights of different names"
    size = sum(float(value.double().square().sum()) for value in expected.values()) ** 0.5
    assert size > 0, "the update changed nothing"
    return (
        sum(float((result[n].double() - value.double()).square().sum()) for n, value in expected.items()) ** 0.5 / size
    )
