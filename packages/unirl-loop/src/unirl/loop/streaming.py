"""Making a rollout: generate, verify the echo, and score, with rewards overlapping generation if the recipe says so."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

from unirl.core.types.array import Array
from unirl.core.types.batch import inverse, rows_by_group
from unirl.core.types.request import Request
from unirl.core.types.rollout import Rollout
from unirl.core.types.track import Track

from .build import reward_weights
from .credit import credited
from .generation import generate_stages
from .parts import Parts, attributed
from .refill import Drawn, Refill
from .requests import step_requests
from .scoring import check_scored, combined, score, score_by

if TYPE_CHECKING:
    from unirl.core.roles import Reward
    from unirl.core.specs.plan import Plan
    from unirl.core.types.data import Prompt

__all__ = ["MAX_WAITING", "MadeRollout", "Phases", "RolloutMaker", "group_pieces"]

MAX_WAITING = 4
"""Pieces that may be generated and not scored. More would hide longer swings of a reward's speed; they would also let
generation go on for longer after a reward has begun to fail or hang."""


class Phases:
    """Seconds of each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, *, owner: str = "the loop") -> Generator[None]:
        """Time a phase, and attribute what fails in it to `owner`."""
        start = time.perf_counter()
        try:
            with attributed(owner, phase=name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, kw_only=True)
class MadeRollout:
    """A rollout with its rewards, and what making it took."""

    rollout: Rollout
    generate_s: float
    """Seconds in which the engine was generating."""
    score_s: float
    """Seconds in which the busiest reward was scoring."""
    latencies_s: tuple[float, ...]
    """Seconds from the end of each piece's generation to the last of its scores."""
    queue_max: int
    """Most pieces that were generated and not scored."""
    drawn: Drawn | None = None
    """How the groups were chosen, where `data.dynamic_sampling_rounds` draws further ones."""


class RolloutMaker:
    """Makes one rollout.

    With `run.reward_overlap_groups`, each reward has a thread of its own: it scores one piece at a time, in their
    order.
    """

    def __init__(
        self,
        parts: Parts,
        plan: Plan,
        requests: Mapping[str, Request],
        *,
        phases: Phases,
        spare: Sequence[Prompt] = (),
    ) -> None:
        """requests: stage -> its request, for those made from prompts.

        phases: where the seconds of the thread that calls `make` go: `generate` and `score`, which is the wait.

        spare: prompts that may replace those of zero-variance groups.
        """
        self._parts, self._plan, self._requests, self._phases = parts, plan, requests, phases
        self._spare = spare
        self._versions = {stage.name: parts.version(stage) for stage in plan.stages}
        self._weights = reward_weights(plan, step=next(iter(requests.values())).rollout)
        self._cancelled = threading.Event()
        self._scorers: _Scorers | None = None

    def make(self) -> MadeRollout:
        """Generate and score every sample of the requests, in their order.

        The pieces and their order are a matter of the requests alone, so the numbers do not depend on who is faster.
        The first failure, of the engine or of a reward, ends it. Raises CancelledError after `cancel`.
        """
        made = self._made(self._requests)
        for stage in self._plan.stages:
            check_scored(made.rollout.tracks[stage.name], stage.rewards)
        return self._refilled(made) if self._plan.data.dynamic_sampling_rounds else made

    def cancel(self) -> None:
        """End `make`, which runs on another thread, when the call that it is in returns."""
        self._cancelled.set()
        if self._scorers is not None:
            self._scorers.wake()

    def _made(self, requests: Mapping[str, Request]) -> MadeRollout:
        """Scored, with credit."""
        made = self._streamed(requests) if self._plan.run.reward_overlap_groups else self._whole(requests)
        rollout = Rollout(tracks=credited(made.rollout.tracks, self._plan.stages))
        return dataclasses.replace(made, rollout=rollout)

    def _refilled(self, first: MadeRollout) -> MadeRollout:
        """The rollout with zero-variance groups replaced by further ones."""
        plan, step = self._plan, next(iter(self._requests.values())).rollout
        all_made = [first]

        def draw(prompts: Sequence[Prompt]) -> Mapping[str, Track]:
            requests = {
                name: dataclasses.replace(request, policy_version=self._versions[name])
                for name, request in step_requests(self._parts, plan, prompts, step=step).items()
            }
            made = self._made(requests)
            all_made.append(made)
            return made.rollout.tracks

        refill = Refill(
            wanted=plan.data.prompts_per_step,
            rounds=plan.data.dynamic_sampling_rounds,
            spare=self._spare,
            stages=plan.stages,
        )
        drawn = refill.run(first.rollout.tracks, draw)
        return MadeRollout(
            rollout=Rollout(
                tracks={
                    name: Track.concat([made.rollout.tracks[name] for made in all_made]).select(rows)
                    for name, rows in drawn.rows.items()
                }
            ),
            generate_s=sum(made.generate_s for made in all_made),
            score_s=sum(made.score_s for made in all_made),
            latencies_s=tuple(seconds for made in all_made for seconds in made.latencies_s),
            queue_max=max(made.queue_max for made in all_made),
            drawn=drawn,
        )

    def _whole(self, requests: Mapping[str, Request]) -> MadeRollout:
        """All of the requests, then all of the scores, on the thread that asks."""
        rollout, generate_s = self._generated(requests)
        self._check_cancelled()
        began = time.perf_counter()
        with self._phases("score"):
            parts = self._parts
            scored = {
                stage.name: score(
                    rollout.tracks[stage.name],
                    {key: parts.rewards[key] for key in stage.rewards},
                    self._weights,
                    self._plan.rewards,
                )
                for stage in self._plan.stages
            }
        score_s = time.perf_counter() - began
        return MadeRollout(
            rollout=Rollout(tracks=scored),
            generate_s=generate_s,
            score_s=score_s,
            latencies_s=(score_s,),
            queue_max=1,
        )

    def _streamed(self, requests: Mapping[str, Request]) -> MadeRollout:
        group_ids = next(iter(requests.values())).group_ids
        pieces = group_pieces(group_ids, self._plan.run.reward_overlap_groups)
        rollouts: list[Rollout] = []
        generate_s = 0.0
        scored_by = {stage.name: stage.rewards for stage in self._plan.stages}
        with _Scorers(self._parts.rewards, self._cancelled, scored_by=scored_by) as scorers:
            self._scorers = scorers
            for rows in pieces:
                with self._phases("score"):
                    scorers.wait(leaving=MAX_WAITING - 1)
                self._check_cancelled()
                piece = {name: request.select(rows) for name, request in requests.items()}
                rollout, seconds = self._generated(piece)
                generate_s += seconds
                rollouts.append(rollout)
                scorers.submit(rollout.tracks)
            with self._phases("score"):
                scorers.wait(leaving=0)
            self._check_cancelled()
        return MadeRollout(
            rollout=self._joined(pieces, rollouts, scorers),
            generate_s=generate_s,
            score_s=max(scorers.busy_s.values()),
            latencies_s=tuple(scorers.latencies_s),
            queue_max=scorers.queue_max,
        )

    def _generated(self, requests: Mapping[str, Request]) -> tuple[Rollout, float]:
        began = time.perf_counter()
        rollout = generate_stages(
            self._parts,
            self._plan,
            requests,
            versions=self._versions,
            during=lambda stage: self._phases("generate", owner=f"engine {stage.engine.name!r}"),
        )
        return rollout, time.perf_counter() - began

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise CancelledError

    def _joined(self, pieces: Sequence[Sequence[int]], rollouts: Sequence[Rollout], scorers: _Scorers) -> Rollout:
        order = [row for rows in pieces for row in rows]
        back = inverse(order)
        tracks: dict[str, Track] = {}
        for name in rollouts[0].tracks:
            track = Track.concat(
                [
                    combined(rollout.tracks[name], scorers.scores(number, name), self._weights, self._plan.rewards)
                    for number, rollout in enumerate(rollouts)
                ]
            )
            if track.parent_track is not None:
                place = {sample: row for row, sample in enumerate(tracks[track.parent_track].sample_ids)}
                parents = cast("tuple[str, ...]", track.parent_ids)
                track = track.select(sorted(range(track.num_rows), key=lambda row: place[parents[row]]))
            elif order != back:
                track = track.select(back)
            tracks[name] = track
        return Rollout(tracks=tracks)


def group_pieces(group_ids: Sequence[str], groups: int) -> list[list[int]]:
    """Rows of each piece: `groups` whole groups, in order of their first rows; the last piece may have fewer."""
    units = list(rows_by_group(group_ids).values())
    return [[row for unit in units[start : start + groups] for row in unit] for start in range(0, len(units), groups)]


class _Scorers:
    """A queue of pieces for each reward, worked off by one thread."""

    def __init__(
        self, rewards: Mapping[str, Reward], cancelled: threading.Event, *, scored_by: Mapping[str, Sequence[str]]
    ) -> None:
        """scored_by: track -> the rewards that score it."""
        self._rewards, self._cancelled, self._scored_by = rewards, cancelled, scored_by
        self._threads = {name: ThreadPoolExecutor(1, thread_name_prefix=f"reward-{name}") for name in rewards}
        self._changed = threading.Condition()
        self._failures: list[BaseException] = []
        self._found: list[dict[str, dict[str, dict[str, Array]]]] = []
        """For each piece: reward -> track -> its scores."""
        self._waiting = 0
        self.queue_max = 0
        self.latencies_s: list[float] = []
        self.busy_s = dict.fromkeys(rewards, 0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        first = self._failures[0] if self._failures else None
        # What is scored on Ctrl-C may take long, and its result is wanted by nobody.
        waits = error is None or isinstance(error, Exception)
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        for thread in self._threads.values():
            thread.shutdown(wait=waits)
        if isinstance(error, Exception) and first is not None and first not in (error, error.__cause__):
            raise first

    def submit(self, tracks: Mapping[str, Track]) -> None:
        """Let every reward score the tracks of the next piece."""
        number, began = len(self._found), time.perf_counter()
        self._found.append({})
        with self._changed:
            self._waiting += 1
            self.queue_max = max(self.queue_max, self._waiting)
        for name, thread in self._threads.items():
            job = thread.submit(self._score, name, tracks, number, began)
            job.add_done_callback(self._note)

    def wait(self, *, leaving: int) -> None:
        """Until no more than `leaving` pieces are to be scored, or the rollout is cancelled.

        Raises the first failure as soon as there is one.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failures or self._cancelled.is_set() or self._waiting <= leaving)
            if self._failures:
                raise self._failures[0]

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def scores(self, number: int, track: str) -> dict[str, dict[str, Array]]:
        """What each reward said of a track of a piece, in the order of the rewards."""
        return {name: self._found[number][name][track] for name in self._scored_by[track]}

    def _score(self, name: str, tracks: Mapping[str, Track], number: int, submitted: float) -> None:
        if self._failures or self._cancelled.is_set():
            return
        began = time.perf_counter()
        result = {
            key: score_by(name, self._rewards[name], track)
            for key, track in tracks.items()
            if name in self._scored_by[key]
        }
        with self._changed:
            self.busy_s[name] += time.perf_counter() - began
            self._found[number][name] = result
            if len(self._found[number]) == len(self._rewards):
                self._waiting -= 1
                self.latencies_s.append(time.perf_counter() - submitted)
                self._changed.notify_all()

    def _note(self, job: Future[None]) -> None:
        error = None if job.cancelled() else job.exception()
        if error is not None:
            with self._changed:
                self._failures.append(error)
                self._changed.notify_all()
