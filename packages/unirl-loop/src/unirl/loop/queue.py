"""The queue between rollouts and training: prompts go in, scored groups come out, one step after the other.

A bound on the steps in flight is the staleness (`run.max_staleness`), scores as futures are the overlap of rewards with
generation (`run.reward_overlap_groups`), and drawing prompts until enough groups are useful is dynamic sampling
(`data.dynamic_sampling_rounds`). Scouts (`data.scouts`) are drawn and scored before the samples that they choose, and
so are samples that give the SDE steps of others their rewards (`Needs.step_rewards`). What is computed depends on the
prompts and the weights alone, never on timing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from unirl.core.match.composition import weighted_rewards
from unirl.core.types.data import Prompt
from unirl.core.types.track import Track

from .build import reward_weights
from .credit import credited
from .dynamic_sampling import UsefulGroups
from .generation import generate_stages
from .parts import Parts, attributed, engine_names, kept_weights, sync_weights
from .phases import Phases
from .requests import step_requests
from .scored_groups import ScoredGroups
from .scoring import check_scored, combined, score_by
from .scouts import chosen_by, known_rewards, scout_requests
from .step_rewards import expectation_requests, with_step_rewards
from .unfinished import check_finished

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan
    from unirl.core.types.array import Array
    from unirl.core.types.request import Request

__all__ = ["MAX_UNSCORED", "GroupQueue"]

MAX_UNSCORED = 4
"""Pieces that may be generated and not scored. More would hide longer swings of a reward's speed; they would also let
generation continue for longer after a reward has begun to fail or hang."""


@dataclass(kw_only=True)
class _Scores:
    """Result of one reward for a piece."""

    by_track: Mapping[str, Mapping[str, Array]]
    """Track -> values of the reward and of its components."""
    busy_s: float
    ended: float
    """Time, as `time.perf_counter` has it."""


class GroupQueue:
    """Scored groups of the steps in flight, in the order of their steps.

    With `run.max_staleness`, a thread generates them, with the weights that trained when their step was put. The
    engine's weights move between steps only: on the thread that puts a step while the engine is idle, else on the
    thread that generates, from a copy. Without it, `get` generates.

    With `run.reward_overlap_groups`, generation goes by pieces of so many groups, and each reward has a thread, which
    scores a piece while later ones are generated.

    On leaving the block, steps that were not taken are dropped: a resumed run makes them again with the newest weights.
    """

    def __init__(self, parts: Parts, plan: Plan) -> None:
        self.parts, self.plan = parts, plan
        self._steps: dict[int, Future[ScoredGroups] | Callable[[Phases], ScoredGroups]] = {}
        """The groups of each step in flight: made on the thread of the queue, or where they are taken."""
        self._versions: Mapping[str, int] = {}
        """Version of the weights that each stage of the newest step samples with."""
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="rollout") if plan.run.max_staleness else None
        self._scorers = {
            name: ThreadPoolExecutor(1, thread_name_prefix=f"reward-{name}")
            for name in (parts.rewards if plan.run.reward_overlap_groups else ())
        }
        self._scored = threading.Condition()
        """Notified when a reward has scored a piece, and at the end."""
        self._is_over = threading.Event()
        """Nothing more is made: a step failed, or the queue is left."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._scored:
            self._is_over.set()
            self._scored.notify_all()
        threads = [*([self._maker] if self._maker else []), *self._scorers.values()]
        for thread in threads:
            thread.shutdown(wait=False, cancel_futures=True)
        if error is None or isinstance(error, Exception):
            # A second Ctrl-C does not wait for a call of an engine or a reward; closing the parts ends it elsewhere.
            for thread in threads:
                thread.shutdown()

    @property
    def last_step(self) -> int | None:
        """The newest step in flight."""
        return max(self._steps, default=None)

    @property
    def num_ready(self) -> int:
        """Steps that are made and not taken."""
        return sum(groups.done() for groups in self._futures())

    def put(self, step: int, prompts: Sequence[Prompt], *, phases: Phases) -> None:
        """Generate the groups of a step after those in flight, with the weights that train now.

        prompts: those of the step, followed with dynamic sampling by those that may replace them.
        """
        assert self.last_step in (None, step - 1), f"step {step} does not follow {self.last_step}"
        versions = {stage.name: self.parts.version(stage) for stage in self.plan.stages}
        with phases("sync", owner=engine_names(self.plan)):
            bring = self._weights(versions)
        make = partial(self._make, step, prompts, versions, bring)
        self._steps[step] = self._maker.submit(make, Phases()) if self._maker else make
        self._versions = versions

    def get(self, step: int, *, phases: Phases) -> ScoredGroups:
        """The groups of the oldest step in flight. Raises what making them raised."""
        oldest = min(self._steps)
        assert oldest == step, f"step {oldest} is the oldest one in flight, {step} was asked for"
        groups = self._steps[step]
        if isinstance(groups, Future):
            with phases("wait"):
                result = groups.result()
        else:
            result = groups(phases)
        del self._steps[step]
        return result

    def settle(self) -> None:
        """Wait until the engine is idle. The steps in flight stay in the queue, and so do their failures."""
        wait(self._futures())

    def _futures(self) -> list[Future[ScoredGroups]]:
        return [groups for groups in self._steps.values() if isinstance(groups, Future)]

    def _weights(self, versions: Mapping[str, int]) -> list[Callable[[], None]]:
        """Give the engines the weights that train now. Returns what does so later, while they are busy."""
        if not all(groups.done() for groups in self._futures()):
            moved = [stage for stage in self.plan.stages if self._versions[stage.name] != versions[stage.name]]
            # Stages that share an engine share its weights.
            moved = list({id(self.parts.engines[stage.name]): stage for stage in moved}.values())
            if not moved:
                return []
            if self.parts.sync is None:
                return [kept_weights(self.parts, stage) for stage in moved]
            self.settle()
        if not self._is_over.is_set():
            sync_weights(self.parts, self.plan)
        return []

    def _make(
        self,
        step: int,
        prompts: Sequence[Prompt],
        versions: Mapping[str, int],
        bring: Sequence[Callable[[], None]],
        phases: Phases,
    ) -> ScoredGroups:
        """Generate and score the groups of a step. The first failure, of an engine or a reward, ends the queue."""
        try:
            self._check_over()
            with attributed(engine_names(self.plan), phase="sync"):
                for one in bring:
                    one()
            data, stages = self.plan.data, self.plan.stages
            draw = partial(self._chosen, step, versions, phases)
            count = data.prompts_per_step if data.dynamic_sampling_rounds else len(prompts)
            spare, rounds = prompts[count:], [draw(prompts[:count])]
            check_finished(rounds[0].tracks, self.plan)
            for stage in stages:
                check_scored(rounds[0].tracks[stage.name], stage.rewards)
            if not data.dynamic_sampling_rounds:
                return rounds[0]
            useful = UsefulGroups(stages, wanted=data.prompts_per_step)
            useful.add(rounds[0].tracks)
            for _ in range(data.dynamic_sampling_rounds):
                count = useful.num_to_draw(len(spare))
                if not count:
                    break
                rounds.append(draw(spare[:count]))
                useful.add(rounds[-1].tracks)
                spare = spare[count:]
            tracks, drawn = useful.chosen()
            return ScoredGroups.of_rounds(rounds, tracks=tracks, drawn=drawn)
        except BaseException:
            self._is_over.set()
            raise

    def _chosen(
        self, step: int, versions: Mapping[str, int], phases: Phases, prompts: Sequence[Prompt]
    ) -> ScoredGroups:
        """Every sample of these prompts, scored, with credit and rewards of steps; of scouts, those that they
        choose."""
        draw, plan = partial(self._drawn, step, versions, phases, prompts), self.plan
        if not plan.data.scouts.samples_per_prompt:
            return self._exact(draw)
        scouts = draw(scout_requests, is_trained=False)
        track, seconds = scouts.tracks[plan.only.name], (scouts.generate_s, scouts.score_s)
        chosen, rewards = chosen_by(track, count=plan.only.samples), known_rewards(track)
        # Their images need not stay in memory beside those of the exact samples.
        del scouts, track
        return replace(self._exact(draw, chosen=chosen).after(*seconds), scouts=rewards)

    def _exact(self, draw: Callable[..., ScoredGroups], *, chosen: Collection[str] | None = None) -> ScoredGroups:
        """The samples to train on, with rewards of single steps where the algorithm needs them. chosen: as of
        `step_requests`."""
        stage, exact = self.plan.stages[0], partial(step_requests, chosen=chosen)
        if not stage.needs.step_rewards:
            return draw(exact)
        # First: workers keep the latents of the newest samples alone.
        expected = draw(lambda *given, **named: expectation_requests(exact(*given, **named)), is_trained=False)
        seconds = expected.generate_s, expected.score_s
        scored = replace(expected.tracks[stage.name], media=None, segment=None, conditions={})
        del expected
        groups = draw(exact)
        track = with_step_rewards(groups.tracks[stage.name], scored)
        return replace(groups, tracks={stage.name: track}).after(*seconds)

    def _drawn(
        self,
        step: int,
        versions: Mapping[str, int],
        phases: Phases,
        prompts: Sequence[Prompt],
        requests_of: Callable[..., dict[str, Request]],
        *,
        is_trained: bool = True,
    ) -> ScoredGroups:
        """Every sample that is requested of these prompts, scored, with credit.

        requests_of: `step_requests`, or a function that is called like it.  is_trained: whether the samples are trained
        on; others are scored only by rewards with a weight, and by their gates.
        """
        plan, size = self.plan, self.plan.run.reward_overlap_groups or len(prompts)
        weights = reward_weights(plan, step=step)
        rewards = list(self.parts.rewards) if is_trained else weighted_rewards(plan.rewards, weights)
        pieces = list[dict[str, Track]]()
        scores = list[dict[str, Future[_Scores]]]()
        ends = list[float]()
        generate_s, most_unscored = 0.0, 0
        try:
            for start in range(0, len(prompts), size):
                with phases("score"):
                    self._wait(scores, leaving=MAX_UNSCORED - 1)
                with phases("request", owner="the sampling of a stage"):
                    piece = prompts[start : start + size]
                    requests = requests_of(self.parts, plan, piece, step=step, versions=versions)
                began = time.perf_counter()
                pieces.append(
                    generate_stages(
                        self.parts,
                        plan,
                        requests,
                        versions=versions,
                        during=lambda stage: phases("generate", owner=f"engine {stage.engine.name!r}"),
                    )
                )
                ends.append(time.perf_counter())
                generate_s += ends[-1] - began
                self._check_over()
                most_unscored = max(most_unscored, 1 + _num_unscored(scores))
                with phases("score"):
                    scores.append({name: self._submit(name, pieces[-1]) for name in rewards})
            with phases("score"):
                self._wait(scores, leaving=0)
        except Exception:
            # A reward that failed before is the cause.
            _raise_failure(scores)
            raise
        result = [{name: future.result() for name, future in each.items()} for each in scores]
        tracks = {
            stage.name: _concat(
                [
                    combined(
                        piece[stage.name],
                        {name: each[name].by_track[stage.name] for name in stage.rewards if name in each},
                        weights,
                        plan.rewards,
                    )
                    for piece, each in zip(pieces, result, strict=True)
                ]
            )
            for stage in plan.stages
        }
        busy = {name: sum(each[name].busy_s for each in result) for name in rewards}
        latencies = tuple(
            max((one.ended for one in each.values()), default=end) - end for each, end in zip(result, ends, strict=True)
        )
        return ScoredGroups(
            tracks=credited(tracks, plan.stages),
            generate_s=generate_s,
            score_s=max(busy.values(), default=0.0) if self._scorers else sum(busy.values()),
            latencies_s=latencies,
            most_unscored=most_unscored,
        )

    def _submit(self, name: str, tracks: Mapping[str, Track]) -> Future[_Scores]:
        """The scores of a reward for a piece: on its thread, or made here where rewards do not overlap."""
        if self._scorers:
            # Under the lock: a thread that has been shut down takes nothing.
            with self._scored:
                self._check_over()
                scores = self._scorers[name].submit(self._score, name, tracks)
        else:
            scores = Future[_Scores]()
            scores.set_result(self._score(name, tracks))
        scores.add_done_callback(self._notify)
        return scores

    def _score(self, name: str, tracks: Mapping[str, Track]) -> _Scores:
        self._check_over()
        began = time.perf_counter()
        result = {
            stage.name: score_by(name, self.parts.rewards[name], tracks[stage.name])
            for stage in self.plan.stages
            if name in stage.rewards
        }
        ended = time.perf_counter()
        return _Scores(by_track=result, busy_s=ended - began, ended=ended)

    def _notify(self, _: Future[_Scores]) -> None:
        with self._scored:
            self._scored.notify_all()

    def _wait(self, scores: Sequence[Mapping[str, Future[_Scores]]], *, leaving: int) -> None:
        """Until no more than `leaving` pieces are to be scored. Raises the failure of a reward as soon as there is one,
        and CancelledError when the queue is left."""

        def is_ready() -> bool:
            return self._is_over.is_set() or _num_unscored(scores) <= leaving or _has_failed(scores)

        with self._scored:
            self._scored.wait_for(is_ready)
        _raise_failure(scores)
        self._check_over()

    def _check_over(self) -> None:
        if self._is_over.is_set():
            raise CancelledError


def _num_unscored(scores: Sequence[Mapping[str, Future[_Scores]]]) -> int:
    return sum(not all(future.done() for future in each.values()) for each in scores)


def _has_failed(scores: Sequence[Mapping[str, Future[_Scores]]]) -> bool:
    return any(_failure(future) is not None for each in scores for future in each.values())


def _raise_failure(scores: Sequence[Mapping[str, Future[_Scores]]]) -> None:
    """Raise the failure of a reward, if there is one."""
    for future in (future for each in scores for future in each.values()):
        if (failure := _failure(future)) is not None:
            raise failure


def _failure(future: Future[_Scores]) -> BaseException | None:
    """The error of a reward; none of one that was not asked because another failed."""
    if not future.done() or future.cancelled():
        return None
    error = future.exception()
    return None if isinstance(error, CancelledError) else error


def _concat(tracks: Sequence[Track]) -> Track:
    return tracks[0] if len(tracks) == 1 else Track.concat(tracks)
