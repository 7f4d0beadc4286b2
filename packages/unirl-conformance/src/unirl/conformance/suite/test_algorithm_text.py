"""Learning from completions."""

from __future__ import annotations

import itertools

import torch
from unirl.conformance.claims import claim
from unirl.conformance.doubles.critic import PlainCritic
from unirl.conformance.doubles.requests import PROMPTS, numbered
from unirl.conformance.doubles.rollouts import sample_text
from unirl.conformance.doubles.text_model import TextWorkbenchModel
from unirl.conformance.doubles.track_numbers import advantages_of
from unirl.conformance.doubles.updates import PlainUpdater
from unirl.conformance.fixtures.algorithm import REWARD_WEIGHTS, AlgorithmBench, scored
from unirl.conformance.fixtures.trial import AlreadyAnchored, FrozenPolicies, of_policy
from unirl.core.roles import Job, Policy
from unirl.core.specs.config import TrainConfig
from unirl.core.types.track import Track
from unirl.loop.requests import build_request
from unirl.numerics.train.stack import train_on
from unirl.numerics.train.track_replay import TrackReplay

STEPS, SAMPLES, TOKENS = 9, 16, 8
LENGTH = 0.2
"""Of a step: each moves the weights by this much along its gradient, whatever the scale of the loss."""
LETTERS = 128
"""Tokens below it are rewarded: half of all."""


@claim("algorithm", track="text")
def test_three_updates_raise_the_surrogate(bench: AlgorithmBench) -> None:
    """Each of three small gradient updates on the same completions makes tokens with positive advantages more likely
    relative to those with negative ones, with the algorithm's token weights.

    Not the loss: one that stops the gradient of its ratio has a value that its gradient does not belong to.

    If it fails: a clip binds at once, a ratio is detached or inverted, or the loss of one call does not fit the next.
    """
    bench.needs_advantages()
    trial = bench.trial()
    track = trial.anchored()
    fixed = AlreadyAnchored(trial.algorithm)
    with torch.no_grad():
        _, losses = trial.loss(track)
    weights = losses.terms[0].weights * advantages_of(track).to(trial.model.device)

    def surrogate() -> float:
        return float((weights * trial.log_probs()).double().sum() / weights.abs().sum())

    _, gradient = trial.train(track, algorithm=fixed)
    norm_squared = sum(float(value.double().square().sum()) for value in of_policy(gradient).values())
    assert norm_squared > 0, "the gradient is 0 although texts differ in their advantages"
    result = [surrogate()]
    for _ in range(3):
        # Each step is 0.003 long: far within the clip, and 1,000 times what fp32 rounds a mean of log-probs by.
        trial.train(track, algorithm=fixed, lr=3e-3 / norm_squared**0.5)
        result.append(surrogate())
    bench.record("gain of three updates in nats", result[-1] - result[0])
    assert all(after > before for before, after in itertools.pairwise(result)), (
        f"the surrogate over three updates is {', '.join(f'{value:.7g}' for value in result)}; each must raise it"
    )


@claim("algorithm", track="text")
def test_training_on_text_raises_the_reward(bench: AlgorithmBench) -> None:
    """It learns: a decoder of random weights that is rewarded for the share of tokens of one half of its vocabulary has
    more of them in the last three of nine rounds than in the first three, by more than three standard errors.

    Whole rounds: completions are generated, scored, compared in their groups, replayed and trained on in micro-batches
    by tokens, and the next ones come from the new weights. A critic starts at 0 and takes steps of the same length.

    If it fails while the other claims hold: look at what only a run has: `progress` (schedules that end in nothing),
    and state that is kept from step to step.
    """
    needs = bench.needs_advantages()
    algorithm, model = bench.algorithm(), TextWorkbenchModel(device=bench.device)
    updater = PlainUpdater(model.net, length=LENGTH)
    critic = PlainCritic(model, is_fresh=True, length=LENGTH) if bench.needs().critic else None
    named: tuple[Policy, ...] = ("reference",) if needs.reference == "policy" else ()
    # The reference has the initial weights.
    policies = FrozenPolicies(model, named, live=named)
    replay = TrackReplay(model, stacked=True, policy_context=policies)
    means: list[float] = []
    spread = 0.0
    for step in range(STEPS):
        request = build_request(
            numbered(PROMPTS),
            track=bench.track,
            sampling=bench.text_sampling(max_new_tokens=TOKENS, temperature=1.0),
            samples_per_prompt=SAMPLES,
            model=model,
            trajectory="none",
            seed=3,
            rollout=step,
            policy_version=step,
        )
        track = sample_text(model, request)
        rewards = [float((tokens < LETTERS).float().mean()) for tokens in track.text.tokens]
        means.append(sum(rewards) / len(rewards))
        if step < STEPS // 3 or step >= STEPS - STEPS // 3:
            spread += sum((value - means[-1]) ** 2 for value in rewards) / len(rewards)
        track, _ = algorithm.advantages(_scored(track, rewards))
        train_on(
            [Job(track=track, algorithm=algorithm)],
            forward=replay,
            updater=updater,
            train=TrainConfig(micro_batch_tokens=600),
            progress=step / STEPS,
            critic=critic,
        )
    third = STEPS // 3
    rise = (sum(means[-third:]) - sum(means[:third])) / third
    # Of the difference of two means of `third` rounds each.
    error = (spread / (third * third * SAMPLES * len(PROMPTS))) ** 0.5
    bench.record("reward of the first rounds", sum(means[:third]) / third)
    bench.record("reward of the last rounds", sum(means[-third:]) / third)
    bench.record("rise in standard errors", rise / error)
    assert rise > 3 * error, (
        f"the reward went from {sum(means[:third]) / third:.3f} to {sum(means[-third:]) / third:.3f} in {STEPS} "
        f"rounds; that is {rise / error:.1f} standard errors, and more than 3 are needed"
    )


def _scored(track: Track, rewards: list[float]) -> Track:
    """With the same reward under each of its names."""
    return scored(track, dict.fromkeys(REWARD_WEIGHTS, rewards))
