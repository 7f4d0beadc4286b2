"""Ratio 1: training and engine compute the same log-probs."""

from __future__ import annotations

from typing import cast

from unirl.conformance.claims import claim
from unirl.conformance.doubles.wrapped_algorithms import LogProbRecorder
from unirl.conformance.fixtures.cell import CellCase
from unirl.conformance.verdicts import NotApplicable
from unirl.core.match.mismatch_bounds import TEXT_FP32
from unirl.core.specs.capability import Cap
from unirl.core.specs.config import TrainConfig

SERIAL = TrainConfig(replay="serial", old_log_probs="replay")
"""Step by step over the whole rollout: the very shapes of the engine's own forwards, so that rounding is the same."""
CACHED = 5e-5
"""In nats: half of 1e-4. A cache adds up in another order than a forward over whole completions, 1e-6 to 1e-5 in
fp32."""


@claim("cell", needs={"engine": (Cap.WEIGHTS_SHARED,)}, track="any")
def test_first_update_in_process_has_ratio_1(case: CellCase) -> None:
    """In process, the first update of a round compares the policy with itself: the log-probs of its forward are the old
    ones bit for bit, so every ratio is exactly 1 and nothing is clipped.

    If it fails: something between the old-log-prob pass and the loss changes the numbers: another batch, another
    precision where gradients are on, dropout, or weights that moved.
    """
    recorder = _rounds(case, rounds=1)
    assert recorder.log_ratios, "the loss never replayed the samples with the weights that train"
    case.record("largest log-ratio", recorder.log_ratios[0], bound=0.0)


@claim("cell", track="any")
def test_log_probs_of_the_engine_are_those_of_training(case: CellCase) -> None:
    """The engine's log-probs equal the backend's for the same samples, before and after an update: exactly if they
    share the module, up to the rounding of a KV cache. Otherwise within half of the limit that stops a run: the
    algorithm's clip range for latents, 0.01 nats in fp32 for completions.

    If it fails in the first round: precision or arithmetic of the engine; compare the velocities of one step. If only
    in the second: weights do not arrive as they were trained; look at names, LoRA scale and what is merged.
    """
    cap, engine = (Cap.LOG_PROBS_TOKEN if case.is_text else Cap.LOG_PROBS_GAUSSIAN), case.subject.found("engine").spec
    if cap not in engine.capabilities:
        raise NotApplicable(f"the claim is about {cap.value!r}; engine {engine.name!r} does not provide it")
    recorder = _rounds(case, rounds=2)
    bound = (CACHED if case.is_text else 0.0) if case.shares_weights else _half_of_what_stops(case)
    assert len(recorder.gaps) == 2, f"{len(recorder.gaps)} of 2 rounds came with log-probs of the engine"
    for gap, when in zip(recorder.gaps, ("before", "after"), strict=True):
        case.record(f"log-prob gap {when} an update", gap, bound=bound)


def _rounds(case: CellCase, *, rounds: int) -> LogProbRecorder:
    if case.algorithm.needs.log_probs == "none":
        raise NotApplicable(f"algorithm {case.algorithm.name!r} takes no log-probs")
    with case.cell(train=SERIAL, wrap=LogProbRecorder, lr=1e-3) as cell:
        for step in range(rounds):
            cell.run(step)
    return cast(LogProbRecorder, cell.parts.only.algorithm)


def _half_of_what_stops(case: CellCase) -> float:
    if case.is_text:
        return TEXT_FP32[0] / 2
    key = case.algorithm.clip_key
    if not key:
        raise NotApplicable(f"algorithm {case.algorithm.name!r} names no clip range (`clip_key`) that bounds the gap")
    return float(getattr(case.factory.config(case.subject.found("algorithm")), key)) / 2
