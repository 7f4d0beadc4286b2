"""Reward overlap: pieces are scored while later ones are generated, and nothing but time depends on it."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from loop_toy import LIMIT_S, Light, ToyEngine, at, met, parts, passed, plan, prompts, threads
from plans import changed
from unirl.core.errors import EchoMismatch, RewardFailed, RunFailed
from unirl.core.specs.plan import Plan
from unirl.core.types.batch import same
from unirl.loop.parts import Parts
from unirl.loop.phases import Phases
from unirl.loop.queue import MAX_UNSCORED, GroupQueue
from unirl.loop.scored_groups import ScoredGroups
from unirl.loop.scoring import score


@dataclass
class Maker:
    """The groups of one step, as a run takes them from the queue."""

    made_of: Parts
    plan: Plan
    phases: Phases

    def make(self) -> ScoredGroups:
        with self.queue() as queue:
            return self.taken(queue)

    def queue(self) -> GroupQueue:
        return GroupQueue(self.made_of, self.plan)

    def taken(self, queue: GroupQueue) -> ScoredGroups:
        queue.put(0, prompts(self.plan.data.prompts_per_step), phases=self.phases)
        return queue.get(0, phases=self.phases)


def maker(made_of: Parts, *, groups: int = 4, pieces_of: int = 1, phases: Phases | None = None) -> Maker:
    """A maker of rollouts with 2 samples per group."""
    toy = plan(groups=groups, run={"reward_overlap_groups": pieces_of})
    toy = changed(toy, rewards=dict.fromkeys(made_of.rewards, toy.rewards["light"]))
    return Maker(made_of, toy, phases or Phases())


def assert_same_rollout(left: ScoredGroups, right: ScoredGroups) -> None:
    for name, track in left.tracks.items():
        assert same(track, right.tracks[name])


@pytest.mark.parametrize("pieces_of", [1, 2, 3])
def test_a_streamed_rollout_is_the_rollout_bit_for_bit(pieces_of: int) -> None:
    whole, streamed = (maker(parts(), pieces_of=size).make() for size in (0, pieces_of))
    assert_same_rollout(whole, streamed)
    track = streamed.tracks["image"]
    # The rewards as one call over all samples gives them, group means included.
    assert same(
        track, score(dataclasses.replace(track, rewards=None, reward_parts={}), {"light": Light()}, {"light": 1.0})
    )


def test_pieces_are_whole_groups_in_the_order_of_the_prompts() -> None:
    engine = ToyEngine()
    made = maker(parts(engine=engine), groups=5, pieces_of=2).make()
    groups = tuple(f"r0/p{sample // 2}" for sample in range(10))
    assert [request.group_ids for request in engine.requests] == [groups[:4], groups[4:8], groups[8:]]
    assert made.tracks["image"].group_ids == groups


def test_a_piece_is_scored_while_the_next_one_is_generated() -> None:
    both = threading.Barrier(2)
    # The first score and the second generation meet: neither could end before the other has begun.
    made = maker(
        parts(
            engine=ToyEngine(during=at(1, lambda: met(both))), rewards={"light": Light(during=at(0, lambda: met(both)))}
        )
    ).make()
    assert made.most_unscored >= 1


def test_rewards_score_a_piece_at_once_and_each_has_one_thread() -> None:
    both, names = threading.Barrier(2), dict[str, set[str]]()

    def meets(name: str) -> Any:
        def during(number: int) -> None:
            names.setdefault(name, set()).add(threading.current_thread().name)
            met(both)

        return during

    rewards = {name: Light(during=meets(name)) for name in ("light", "other")}
    maker(parts(rewards=rewards)).make()
    assert len(names["light"]) == len(names["other"]) == 1
    assert names["light"] != names["other"]


def test_the_numbers_do_not_depend_on_which_reward_is_slow() -> None:
    finished = threading.Event()
    last = {"light": Light(during=at(0, lambda: passed(finished))), "other": Light(during=at(3, finished.set))}
    # `light` begins once `other` is done with everything, so the scores arrive in another order than without waiting.
    slow = maker(parts(rewards=last)).make()
    assert_same_rollout(maker(parts(rewards={"light": Light(), "other": Light()})).make(), slow)
    assert len(slow.latencies_s) == 4
    assert slow.most_unscored == 4


def test_generation_waits_when_scoring_is_too_far_behind() -> None:
    full, beyond, seen = threading.Event(), threading.Event(), list[int]()
    light = Light()

    def generating(number: int) -> None:
        seen.append(number - light.done)
        if number == MAX_UNSCORED - 1:
            full.set()
        if number >= MAX_UNSCORED and light.done == 0:
            beyond.set()

    def first_score() -> None:
        passed(full)
        # Time enough for a generation that does not wait; one that waits never gets there.
        assert not beyond.wait(timeout=0.2)

    light.during = at(0, first_score)
    made = maker(parts(engine=ToyEngine(during=generating), rewards={"light": light}), groups=8).make()
    assert len(seen) == 8
    assert max(seen) <= MAX_UNSCORED - 1
    assert made.most_unscored == MAX_UNSCORED


def test_a_reward_that_fails_ends_generation_and_is_named() -> None:
    both = threading.Barrier(2)

    def fail() -> None:
        met(both)
        raise ValueError("no face in the picture")

    engine = ToyEngine(during=at(1, lambda: met(both)))
    with pytest.raises(RewardFailed, match=r"reward\.light: raised ValueError: no face in the picture on a batch of 2"):
        maker(parts(engine=engine, rewards={"light": Light(during=at(0, fail))}), groups=64).make()
    # Some pieces may be generated before the failure is noted; the first one still counts as waiting.
    assert 2 <= len(engine.requests) <= MAX_UNSCORED
    assert not threads("reward-")


def test_an_engine_that_fails_while_rewards_wait_is_named_with_its_phase() -> None:
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise OSError("the engine's process is gone")

    light = Light(during=at(0, lambda: passed(failed)))
    with pytest.raises(
        RunFailed, match=r"engine 'own' failed in phase 'generate': OSError: the engine's process is gone"
    ):
        maker(parts(engine=ToyEngine(during=at(2, fail)), rewards={"light": light})).make()
    assert not threads("reward-")


def test_the_echo_of_every_piece_is_verified() -> None:
    engine = ToyEngine()
    engine.during = at(2, lambda: setattr(engine, "version", 7))
    with pytest.raises(EchoMismatch, match=r"image\.policy_version\[0\]: the request says 0, the engine used 7"):
        maker(parts(engine=engine)).make()


def test_ctrl_c_does_not_wait_for_a_slow_reward() -> None:
    scoring, release, left, light = (threading.Event(), threading.Event(), threading.Event(), Light())

    def slow() -> None:
        scoring.set()
        release.wait(timeout=LIMIT_S)
        left.set()

    def interrupt() -> None:
        passed(scoring)
        raise KeyboardInterrupt

    light.during = at(0, slow)
    with pytest.raises(KeyboardInterrupt):
        maker(parts(engine=ToyEngine(during=at(1, interrupt)), rewards={"light": light})).make()
    assert not left.is_set()
    release.set()
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("reward-")]:
        thread.join(timeout=LIMIT_S)
    assert light.calls == 1
    assert not threads("reward-")


def test_a_cancelled_rollout_ends_with_the_call_that_it_is_in() -> None:
    scoring, release = threading.Event(), threading.Event()

    def first_score() -> None:
        scoring.set()
        passed(release)

    engine, light = ToyEngine(), Light(during=at(0, first_score))
    result = maker(parts(engine=engine, rewards={"light": light}), groups=8)
    queue = result.queue()
    with ThreadPoolExecutor(2) as pool:
        made = pool.submit(result.taken, queue)
        passed(scoring)
        left = pool.submit(queue.__exit__, None, None, None)
        passed(queue._is_over)
        release.set()
        with pytest.raises(CancelledError):
            made.result(timeout=LIMIT_S)
        left.result(timeout=LIMIT_S)
    assert len(engine.requests) <= MAX_UNSCORED
    assert light.calls == 1


def test_the_phases_are_those_of_the_thread_that_asks() -> None:
    phases = Phases()
    made = maker(parts(), phases=phases).make()
    assert set(phases.seconds) == {"sync", "request", "generate", "score"}
    # The same spans, timed inside and outside of the phase.
    assert phases.seconds["generate"] <= made.generate_s
    assert torch.tensor(made.latencies_s).min() > 0
