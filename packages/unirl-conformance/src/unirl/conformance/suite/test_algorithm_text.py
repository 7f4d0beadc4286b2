"""Learning from completions."""

from __future__ import annotations

import itertools

import torch
from unirl.conformance.claims import claim
from unirl.conformance.doubles.critic import PlainCritic
from unirl.conformance.doubles.plain_updater import PlainUpdater
from unirl.conformance.doubles.requests import PROMPTS
from unirl.conformance.doubles.rollouts import make_rollout
from unirl.conformance.doubles.track_numbers import advantages_of
from unirl.conformance.doubles.wrapped_algorithms import KeepsOldLogProbs
from unirl.conformance.fixtures.algorithm import REWARD_WEIGHTS, AlgorithmCase, scored
from unirl.conformance.fixtures.training_setup import FrozenPolicies, policy_part
from unirl.core.roles import Job, Policy
from unirl.core.specs.config import TrainConfig
from unirl.numerics.train.stack import train_on
from unirl.numerics.train.track_replay import TrackReplay

STEPS, SAMPLES, TOKENS = 9, 16, 8
LENGTH = 0.2
"""Length of a step: each moves the weights by this much along its gradient, whatever the scale of the loss."""
LETTERS = 128
"""Tokens below it are rewarded: half of all."""


@claim("algorithm", track="text")
def test_three_updates_raise_the_surrogate(case: AlgorithmCase) -> None:
    """Each of three small gradient updates on the same completions makes tokens with positive advantages more likely
    relative to those with negative ones, with the algorithm's token weights.

    Not the loss: one that stops the gradient of its ratio has a value that its gradient does not belong to.

    If it fails: a clip binds at once, a ratio is detached or inverted, or the loss of one call does not fit the next.
    """
    case.needs_advantages()
    setup = case.setup()
    track = setup.with_old_log_probs()
    fixed = KeepsOldLogProbs(setup.algorithm)
    with torch.no_grad():
        _, losses = setup.loss(track)
    weights = losses.terms[0].weights * advantages_of(track).to(setup.model.device)

    def surrogate() -> float:
        return float((weights * setup.log_probs()).double().sum() / weights.abs().sum())

    _, gradient = setup.train(track, algorithm=fixed)
    norm_squared = sum(float(value.double().square().sum()) for value in policy_part(gradient).values())
    assert norm_squared > 0, "the gradient is 0 although texts differ in their advantages"
    result = [surrogate()]
    for _ in range(3):
        # Each step is 0.003 long: far within the clip, and 1,000 times what fp32 rounds a mean of log-probs by.
        setup.train(track, algorithm=fixed, lr=3e-3 / norm_squared**0.5)
        result.append(surrogate())
    case.record("gain of three updates in nats", result[-1] - result[0])
    assert all(after > before for before, after in itertools.pairwise(result)), (
        f"the surrogate over three updates is {', '.join(f'{value:.7g}' for value in result)}; each must raise it"
    )


@claim("algorithm", track="text")
def test_training_on_text_raises_the_reward(case: AlgorithmCase) -> None:
    """It learns: a decoder of random weights that is rewarded for the share of tokens of one half of its vocabulary has
    more of them in the last three of nine rounds than in the first three, by more than three standard errors.

    Whole rounds: completions are generated, scored, compared in their groups, replayed and trained on in micro-batches
    by tokens, and the next ones come from the new weights. A critic starts at 0 and takes steps of the same length.

    If it fails while the other claims hold: look at what only a run has: `progress` (schedules that end in nothing),
    and state that is kept from step to step.
    """
    needs = case.needs_advantages()
    algorithm, model = case.algorithm(), case.model()
    updater = PlainUpdater(model.net, length=LENGTH)
    critic = PlainCritic(model, is_fresh=True, length=LENGTH) if needs.critic else None
    named: tuple[Policy, ...] = ("reference",) if needs.reference == "policy" else ()
    # The reference has the initial weights.
    policies = FrozenPolicies(model, named, live=named)
    replay = TrackReplay(model, stacked=True, policy_context=policies)
    sampling = case.text_sampling(max_new_tokens=TOKENS, temperature=1.0)
    means, variances = list[float](), list[float]()
    for step in range(STEPS):
        request = case.request(model, sampling, samples_per_prompt=SAMPLES, rollout=step, policy_version=step)
        track = make_rollout(model, request)
        rewards = [float((tokens < LETTERS).float().mean()) for tokens in track.text.tokens]
        means.append(sum(rewards) / len(rewards))
        variances.append(sum((value - means[-1]) ** 2 for value in rewards) / len(rewards))
        # The same reward under each of its names.
        track, _ = algorithm.advantages(scored(track, dict.fromkeys(REWARD_WEIGHTS, rewards)))
        train_on(
            [Job(track=track, algorithm=algorithm)],
            forward=replay,
            updater=updater,
            train=TrainConfig(micro_batch_tokens=600),
            progress=step / STEPS,
            critic=critic,
        )
    case.check_rise(means, variances, samples=SAMPLES * len(PROMPTS))
