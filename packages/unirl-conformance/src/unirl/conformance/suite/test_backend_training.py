"""One update: AdamW on the trained weights, with an algorithm called as its role says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from unirl.conformance.claims import claim
from unirl.conformance.doubles.plain_training import plain_of
from unirl.conformance.doubles.ppo import PPO
from unirl.conformance.doubles.tiny_denoiser import TinyDenoiser
from unirl.conformance.doubles.trainer import largest_gap
from unirl.conformance.fixtures.backend import GRADIENT, BackendCase
from unirl.core.roles import Job
from unirl.core.specs.capability import Cap
from unirl.core.specs.config import TrainConfig

ADAMW: Mapping[str, Any] = {
    "lr": 1e-2,
    "betas": [0.8, 0.95],
    "eps": 1e-4,
    "weight_decay": 0.0,
    "max_grad_norm": None,
}
"""None of them a default, so that a backend that leaves one unread shows."""

ADAMW_BOUND = 2e-3
"""In units of the learning rate, after three steps. Gradients differ by fp32 rounding, 1e-8 here, and Adam divides them
by no less than eps = 1e-4 and follows them for three steps; a wrong beta, eps or bias correction is 1e-2 and more."""

GRADIENT_BOUND = 2e-5
"""Relative to the largest change of a weight: fp32 rounding of gradients (1e-6), seen through two steps."""


@claim("backend", proves=Cap.TRAIN_FULL)
def test_full_training_is_torchs_adamw(case: BackendCase) -> None:
    """Three updates change the weights as torch's own AdamW does on the plain module, and every weight takes part.

    If it fails: compare the config's lr, betas and eps with what the optimizer is given; look for gradients that are
    averaged over something (micro-batches, steps) that the loss is already divided by; and, where weights did not
    change at all, for parameters that are frozen or not handed to the optimizer.
    """
    with case.backend("full", **ADAMW) as trainer:
        plain = plain_of(trainer, **ADAMW)
        for number in range(3):
            trainer.train(case.track(number))
            plain.step(case.track(number))
        result = trainer.trained()
        still = [name for name, value in trainer.plain.items() if torch.equal(result[name], value)]
    assert not still, f"{len(still)} of {len(result)} weights did not change, such as {still[0]!r}"
    case.record("weights, in learning rates", largest_gap(result, plain.weights) / ADAMW["lr"], bound=ADAMW_BOUND)


@claim("backend", proves=Cap.TRAIN_LORA)
def test_lora_training_is_torchs_adamw_on_the_adapters(case: BackendCase) -> None:
    """Three updates change A and B as torch's own AdamW does when the plain module runs with W + scale B A.

    If it fails: compare the scale (alpha / rank) of the forward pass with the one that `weights` names, then lr, betas
    and eps with what the optimizer is given; look for adapters that are frozen or not handed to the optimizer.
    """
    with case.backend("lora", **ADAMW) as trainer:
        plain = plain_of(trainer, **ADAMW)
        before = trainer.trained()
        for number in range(3):
            trainer.train(case.track(number))
            plain.step(case.track(number))
        result = trainer.trained()
    still = [name for name, value in before.items() if torch.equal(result[name], value)]
    assert not still, f"{len(still)} of {len(result)} adapter weights did not change, such as {still[0]!r}"
    case.record("adapters, in learning rates", largest_gap(result, plain.weights) / ADAMW["lr"], bound=ADAMW_BOUND)


@claim("backend")
def test_weight_decay_is_decoupled(case: BackendCase) -> None:
    """Each step subtracts lr x weight_decay of every trainable weight, decoupled from Adam's step.

    If it fails: look for `Adam(weight_decay=...)`, which adds the decay to the gradient, instead of `AdamW`; and for
    groups of parameters (biases, norms) that are left out of the decay.
    """
    # 10 x 0.02 is a fifth of every weight in each step.
    settings = {**GRADIENT, "weight_decay": 0.02}
    for training in case.trainings:
        with case.backend(training, **settings) as trainer:
            before, plain = trainer.trained(), plain_of(trainer, **settings)
            for number in range(2):
                trainer.train(case.track(number))
                plain.step(case.track(number))
            gap = largest_gap(trainer.trained(), plain.weights) / largest_gap(before, plain.weights)
        case.record(f"{training}: relative gap of the change", gap, bound=GRADIENT_BOUND)


@claim("backend")
def test_gradients_are_clipped_by_their_global_norm(case: BackendCase) -> None:
    """`max_grad_norm` bounds the norm over all weights at once, as torch's `clip_grad_norm_` does.

    If it fails: look for a norm per tensor, per block or per rank, for clipping after the step or before the last
    micro-batch, and for a bound that is not the config's.
    """
    settings = {**GRADIENT, "max_grad_norm": 0.01}
    for training in case.trainings:
        with case.backend(training, **settings) as trainer:
            before, plain = trainer.trained(), plain_of(trainer, **settings)
            for number in range(2):
                trainer.train(case.track(number))
                norm = plain.step(case.track(number))
                assert norm > 2 * settings["max_grad_norm"], f"the case is meant to clip; its norm is {norm}"
            result = trainer.trained()
        gap = largest_gap(result, plain.weights) / largest_gap(before, plain.weights)
        case.record(f"{training}: relative gap of the change", gap, bound=GRADIENT_BOUND)


@claim("backend")
def test_a_loss_may_compare_with_another_policy(case: BackendCase) -> None:
    """A loss that replays with another policy (a KL to the reference, a lagged policy) sees that policy's weights, and
    its gradient is that of the live ones.

    If it fails: look whether `replay(track, policy=...)` switches weights at all, whether it runs without gradient,
    and whether swapping weights in place spoils the graph of the live forward that came before it.
    """
    for training in case.trainings_with_policies:
        with case.backend(training, *case.extras(training), **GRADIENT) as trainer:
            # The reference is the live policy before the first update, and a pull to it nothing.
            trainer.train(case.track(0))
            for policy in trainer.policies:
                before, others, plain = trainer.trained(), trainer.whole(policy), plain_of(trainer, **GRADIENT)
                trainer.train(case.track(1), PPO(pull_to=policy))
                plain.step(case.track(1), pull_to=others)
                gap = largest_gap(trainer.trained(), plain.weights) / largest_gap(before, plain.weights)
                case.record(f"{training}, {policy}: relative gap of the change", gap, bound=GRADIENT_BOUND)


@claim("backend", needs={"backend": (Cap.TRAIN_FULL,)})
def test_another_model_may_be_the_reference_of_a_job(case: BackendCase) -> None:
    """A loss that replays with the reference policy sees the model that its job names as reference, a teacher, whether
    or not the initial weights are kept.

    If it fails: give `Job.references` to the replay of that job's track; `unirl.numerics.train.stack.train_on` gets the
    jobs as they are.
    """
    teacher = TinyDenoiser(device=case.device, seed=1)
    weights = {name: param.detach() for name, param in teacher.net.named_parameters()}
    with case.backend("full", **GRADIENT) as trainer:
        before, plain = trainer.trained(), plain_of(trainer, **GRADIENT)
        job = Job(name="image", track=case.track(), algorithm=PPO(pull_to="reference"), references={"": teacher})
        trainer.backend.train([job], progress=0.25)
        plain.step(case.track(), pull_to=weights)
        gap = largest_gap(trainer.trained(), plain.weights) / largest_gap(before, plain.weights)
        case.record("relative gap of the change", gap, bound=GRADIENT_BOUND)


@claim("backend")
def test_the_first_update_has_ratio_one(case: BackendCase) -> None:
    """In the first update the ratio of new to old policy is exactly 1: dropout is off while training, even when the
    model was handed over in training mode, and anchor and loss run the same arithmetic.

    If it fails: call `eval()` on the trained module and never `train()`; look for whatever else makes two forwards
    of one input differ, such as an old-log-prob pass on other micro-batches than the loss.
    """
    train = TrainConfig(updates_per_step=2, micro_batch_size=2, old_log_probs="replay")
    for training in case.trainings:
        model = case.model()
        model.net.train()
        with case.backend(training, model=model, train=train, **GRADIENT) as trainer:
            algorithm = PPO()
            trainer.train(case.track(), algorithm)
        # Six rows in two updates: the first has two micro-batches.
        deviations = [call.deviation for call in algorithm.calls if call.phase == "loss"][:2]
        case.record(f"{training}: |ratio - 1| in the first update", max(deviations), bound=0.0)


@claim("backend")
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(case: BackendCase) -> None:
    """An update with an infinite or NaN gradient is skipped and counted: weights, moments and averages are unchanged.

    If it fails: check the norm of all gradients before the optimizer is called, leave the step out where it is not
    finite, and return the number of such steps as `num_skipped`.
    """
    good, bad = case.track(0), case.track(1)
    for training in case.trainings:
        caps = case.extras(training)
        with case.backend(training, *caps) as trainer, case.backend(training, *caps) as twin:
            for one in (trainer, twin):
                one.train(good)
            before, version = trainer.everything(), trainer.backend.version
            for value in (math.inf, math.nan):
                assert bad.advantages is not None
                advantages = bad.advantages.clone()
                advantages[2] = value
                report = trainer.train(dataclasses.replace(bad, advantages=advantages))
                counts = (report.num_updates, report.num_skipped, trainer.backend.version - version)
                assert counts == (0, 1, 0), (
                    f"{training}: of one update with a gradient of {value}, {counts[0]} are reported as done and "
                    f"{counts[1]} as skipped, and the version rose by {counts[2]}; 0, 1 and 0 are right"
                )
                after = trainer.everything()
                changed = [name for name in before if not torch.equal(before[name], after[name])]
                assert not changed, f"{training}: a gradient with {value} changed {changed[0]!r}"
            for one in (trainer, twin):
                one.train(good)
            gap = largest_gap(trainer.everything(), twin.everything())
        case.record(f"{training}: gap of the next update", gap, bound=0.0)


@claim("backend")
def test_the_version_counts_optimizer_steps(case: BackendCase) -> None:
    """The policy version starts at 0 and rises by one with every optimizer step, also with several in one rollout.

    If it fails: count where the optimizer steps, not where `train` is called; skipped steps do not count.
    """
    training = case.trainings[0]
    with case.backend(training, train=TrainConfig(updates_per_step=2)) as trainer:
        versions, updates = [trainer.backend.version], list[int]()
        for number in range(2):
            updates.append(trainer.train(case.track(number)).num_updates)
            versions.append(trainer.backend.version)
            trainer.backend.end_rollout()
    assert versions == [0, 2, 4], f"after 0, 1 and 2 rollouts of 2 updates the version is {versions}"
    assert updates == [2, 2], f"two rollouts of 2 updates report {updates}"


@claim("backend")
def test_the_anchor_comes_before_the_first_update(case: BackendCase) -> None:
    """`train.old_log_probs=replay`: they are computed before the first update, once per micro-batch, without gradient.

    If it fails: run `algorithm.anchor` under `no_grad` on the micro-batches of all updates, keep what it returns, and
    hand just these micro-batches to `algorithm.loss`, with the progress of the run.
    """
    track, train = case.track(), TrainConfig(updates_per_step=2, micro_batch_size=2, old_log_probs="replay")
    for training in case.trainings:
        algorithm = PPO()
        with case.backend(training, train=train, **GRADIENT) as trainer:
            trainer.train(track, algorithm)
        phases = [call.phase for call in algorithm.calls]
        anchors = [call for call in algorithm.calls if call.phase == "old log-probs"]
        losses = [call for call in algorithm.calls if call.phase == "loss"]
        assert phases == ["old log-probs"] * len(anchors) + ["loss"] * len(losses), f"calls came in the order {phases}"
        anchored, trained = ([call.sample_ids for call in calls] for calls in (anchors, losses))
        assert sorted(anchored) == sorted(trained), f"anchored were {anchored}, trained on {trained}"
        rows = sorted(row for call in losses for row in call.sample_ids)
        assert rows == sorted(track.sample_ids), f"rows trained on were {rows}; each is due once"
        assert max(len(call.sample_ids) for call in losses) <= 2, "a micro-batch has more rows than `micro_batch_size`"
        assert not any(call.with_grad for call in anchors), "the old-log-prob pass records gradients"
        assert all(call.with_grad for call in losses), "losses are computed without gradient"
        assert {call.progress for call in losses} == {0.25}, "losses are not told the progress that `train` was given"
        assert max(call.deviation for call in losses[2:]) > 0, (
            "the second update compares with the weights it starts from"
        )
