"""How an algorithm asks for samples."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from unirl.conformance.claims import claim
from unirl.conformance.fixtures.algorithm import AlgorithmBench
from unirl.core.roles import Algorithm, LatentAlgorithm
from unirl.core.types.batch import same
from unirl.core.types.request import LatentRequest
from unirl.core.types.sampling import LatentSamplingConfig, SdeStepsConfig

GROUPS = tuple(f"r4/p{number}" for number in (0, 0, 0, 1, 1, 2, 2, 2))
SAMPLES = tuple(f"{group}/{row}" for row, group in enumerate(GROUPS))
STEPS = 8
NOISY: tuple[SdeStepsConfig, ...] = (
    SdeStepsConfig(mode="all"),
    SdeStepsConfig(mode="fraction", first=0.25, last=0.75),
    SdeStepsConfig(mode="fixed", steps=[0, 3, 5]),
    SdeStepsConfig(mode="random", count=3),
    SdeStepsConfig(mode="random", count=3, per_group=True),
    SdeStepsConfig(mode="window", window=2, move_every=1),
    SdeStepsConfig(mode="window", window=2, strategy="random", per_group=True),
)


@claim("algorithm")
def test_a_request_is_a_pure_function_of_its_arguments(bench: AlgorithmBench) -> None:
    """The same seed, rollout and ids give the same request, on every rank and after every resume.

    If it fails: draw from the seed, rollout and ids (`unirl.numerics.noise.stream`), never from a global generator,
    the clock or a counter of calls.
    """
    algorithm = bench.algorithm()
    for sampling in _samplings(bench):
        with _generators(1):
            before = _drawn()
        with _generators(1):
            first = _request(algorithm, sampling)
            assert _drawn() == before, f"{_of(sampling)}: the request moved a global random generator"
        with _generators(2):
            _request(algorithm, sampling, rollout=9, seed=5)
            second = _request(algorithm, sampling)
        third = _request(bench.algorithm(), sampling)
        for again, how in ((second, "another call"), (third, "another object")):
            assert same(first, again), f"{_of(sampling)}: {how} with the same arguments gives another request"


@claim("algorithm")
def test_sde_steps_are_in_range_and_shared_by_a_group(bench: AlgorithmBench) -> None:
    """Within a group samples differ only by noise: they share their SDE steps, which rise and are in the schedule.

    A group whose samples have different stochastic steps compares samples of different policies; training on it
    collapses within some dozens of steps.

    If it fails: take the steps from the group's id, and look for an index past the last step (`len(sigmas)` counts one
    more sigma than there are steps).
    """
    algorithm, needs = bench.algorithm(), bench.needs()
    for sampling in _samplings(bench):
        for rollout in (0, 4, 1000):
            steps = _request(algorithm, sampling, rollout=rollout).sde_steps
            where = f"{_of(sampling)}, rollout {rollout}"
            assert steps.dtype == torch.int64 and steps.ndim == 2, f"{where}: sde_steps is {steps.dtype} {steps.shape}"
            rows = [[step for step in row if step != -1] for row in steps.tolist()]
            for row in rows:
                is_rising = row == sorted(set(row)) and all(0 <= step < STEPS for step in row)
                assert is_rising, f"{where}: steps {row} must rise and lie in 0 to {STEPS - 1}"
                assert row or not needs.stochastic, f"{where}: a sample has no stochastic step, and the spec needs some"
            for group in set(GROUPS):
                own = [row for row, of in zip(rows, GROUPS, strict=True) if of == group]
                assert all(row == own[0] for row in own), f"{where}: samples of group {group!r} have the steps {own}"


@claim("algorithm")
def test_noise_ids_follow_same_initial_noise(bench: AlgorithmBench) -> None:
    """`sampling.same_initial_noise` starts the samples of a group from one noise; without it each has its own.

    If it fails: noise ids are group ids with it, sample ids without.
    """
    algorithm = bench.algorithm()
    for is_same, expected in ((False, SAMPLES), (True, GROUPS)):
        for sampling in _samplings(bench, same_initial_noise=is_same):
            result = _request(algorithm, sampling).noise_ids
            assert result == expected, f"same_initial_noise {is_same}: noise ids are {result}, {expected} was expected"


@claim("algorithm")
def test_a_request_keeps_the_sampling_that_it_is_given(bench: AlgorithmBench) -> None:
    """Sigmas and settings are those of the recipe: an algorithm chooses noise and steps, but does not change the
    former.

    If its spec needs the full trajectory, it also keeps every position, since engines store the window by default.

    If it fails: hand `sampling` and `sigmas` on as they are. Settings that an algorithm cannot train with are for
    `problems` of its config to refuse, before the run.
    """
    algorithm, needs = bench.algorithm(), bench.needs()
    for sampling in _samplings(bench):
        request = _request(algorithm, sampling)
        assert same(request.sigmas, _sigmas()), f"{_of(sampling)}: got sigmas {request.sigmas}, expected {_sigmas()}"
        assert request.sampling == sampling, f"{_of(sampling)}: got {request.sampling}, expected {sampling}"
        assert request.num_rows == len(SAMPLES), f"{_of(sampling)}: {request.num_rows} rows for {len(SAMPLES)} samples"
        kept = {int(position) for position in request.keep.flatten()}
        assert needs.trajectory != "full" or kept >= set(range(STEPS + 1)), (
            f"the spec needs the full trajectory, and the request keeps {sorted(kept)}"
        )


def _samplings(bench: AlgorithmBench, **settings: Any) -> Iterator[LatentSamplingConfig]:
    needs = bench.needs()
    kinds = NOISY if needs.stochastic or needs.log_probs == "gaussian" else (SdeStepsConfig(mode="none"), *NOISY)
    for sde in kinds:
        yield bench.sampling(needs, num_inference_steps=STEPS, sde=sde, kernel="flow-sde", eta=0.7, **settings)


def _sigmas() -> torch.Tensor:
    """As no scheduler makes them."""
    return torch.tensor([1.0, 0.93, 0.8712345, 0.7, 0.53, 0.41, 0.2999999, 0.17, 0.0])


def _request(
    algorithm: Algorithm, sampling: LatentSamplingConfig, *, rollout: int = 4, seed: int = 11
) -> LatentRequest:
    return cast("LatentAlgorithm", algorithm).latent_request(
        sampling,
        sigmas=_sigmas(),
        latent_shape=(4, 3, 2),
        seed=seed,
        rollout=rollout,
        sample_ids=SAMPLES,
        group_ids=GROUPS,
    )


def _of(sampling: LatentSamplingConfig) -> str:
    return f"sde.mode {sampling.sde.mode}" + (" per group" if sampling.sde.per_group else "")


@contextmanager
def _generators(seed: int) -> Iterator[None]:
    """The global generators seeded inside, and back as they were afterwards."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _drawn() -> tuple[float, float, float]:
    """The next number of each global generator."""
    return float(torch.rand(())), random.random(), float(np.random.random())
