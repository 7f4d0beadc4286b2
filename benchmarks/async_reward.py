"""How much of a slow reward streaming and rollouts ahead hide: the same steps sequentially, streamed, and ahead.

    python benchmarks/async_reward.py [--rounds 3] [--steps 4] [--reward-s 3]

The quickstart's recipe and reward, slowed down by a sleep per sample like a remote reward model. Sequential and
streamed steps run in this process; ahead runs under Ray with a dedicated rollout worker. Rounds of the three are
interleaved. The first and last step of a round fill and drain the pipeline and are not counted. Prints minima over the
counted steps: of each phase, of the whole step, and the lower bound of a step given the phases.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.core.data.prompts import PromptOrder, read_prompts
from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import Trackers
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import Reward, ScoreInput, Scores
from unirl.core.specs.plan import Plan
from unirl.core.types.event import Event
from unirl.loop.build import build_parts
from unirl.loop.queue import GroupQueue
from unirl.loop.step import train_step

SETTINGS = [
    "run.threads=1",
    "run.media_every=0",
    "run.max_steps=100000",
    "data.prompts_per_step=12",
    "data.samples_per_prompt=8",
    "engine.forward_batch=8",
    "train.old_log_probs=engine",
    "advantage.constant_reward=skip",
    "~tracker.report",
]
PHASES = ("generate", "score", "train")
VARIANTS = {
    "sequential": [],
    "streamed": ["run.reward_overlap_groups=1"],
    "streamed, ahead": [
        "run.reward_overlap_groups=1",
        "run.max_staleness=1",
        "launcher=ray",
        "launcher.placement=separate",
        "launcher.num_cpus=4",
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round that count")
    parser.add_argument("--reward-s", type=float, default=3.0, help="seconds that a step's samples cost more")
    options = parser.parse_args()
    catalog = Catalog.discover()
    variants: list[Variant] = []
    try:
        for name, words in VARIANTS.items():
            plan = compose("quickstart", [*SETTINGS, *words], catalog=catalog)
            variants.append(Variant(name, plan, catalog=catalog, reward_s=options.reward_s))
        for _ in range(options.rounds):
            for variant in variants:
                variant.round(options.steps)
    finally:
        for variant in variants:
            variant.close()
    columns = (*PHASES, "step", "lower bound", "step / bound", "step / longest", "staleness")
    print(f"{'':16}" + "".join(f"{column:>15}" for column in columns))
    for variant in variants:
        best = variant.best()
        print(f"{variant.name:16}" + "".join(f"{best[column]:15.3f}" for column in columns), flush=True)


class Slow:
    """A reward with an additional delay per sample."""

    def __init__(self, reward: Reward, *, sample_s: float) -> None:
        self._reward, self._sample_s = reward, sample_s

    def score(self, samples: ScoreInput) -> Scores:
        time.sleep(self._sample_s * len(samples.sample_ids))
        return self._reward.score(samples)

    def close(self) -> None:
        self._reward.close()


class Variant:
    def __init__(self, name: str, plan: Plan, *, catalog: Catalog, reward_s: float) -> None:
        self.name, self._plan = name, plan
        self._counted: list[Mapping[str, float]] = []
        """Seconds of each counted step, and the age of its samples."""
        self._launcher: Any = None
        if plan.launcher is not None:
            self._launcher = catalog.resolve(plan.launcher.spec.build)(plan.launcher.config)
        parts = self._launcher.launch(plan, catalog=catalog) if self._launcher else build_parts(plan, catalog=catalog)
        sample_s = reward_s / (plan.data.prompts_per_step * plan.data.samples_per_prompt)
        slow = {key: Slow(reward, sample_s=sample_s) for key, reward in parts.rewards.items()}
        self._parts = dataclasses.replace(parts, rewards=slow)
        self._rows = read_prompts(Path(plan.data.train))
        data = plan.data
        self._order = PromptOrder(len(self._rows), data.prompts_per_step, seed=plan.run.seed, shuffle=data.shuffle)
        self._step = 0
        self._events = EventStream()
        self._seen: list[Event] = []
        self._events.listen(self._seen.append)

    def round(self, steps: int) -> None:
        """Consecutive steps: one to fill the pipeline, the counted ones, and one to drain it."""
        end = self._step + steps + 2
        with GroupQueue(self._parts, self._plan) as queue:
            for number in range(steps + 2):
                began = time.perf_counter()
                train_step(
                    queue,
                    self._prompts,
                    step=self._step,
                    end=end,
                    events=self._events,
                    trackers=Trackers({}, EventStream()),
                )
                wall = time.perf_counter() - began
                self._step += 1
                if 0 < number <= steps:
                    self._counted.append(measured(self._seen[-1], wall))

    def best(self) -> dict[str, float]:
        """The minimum of each number, and the lower bound of a step computed from them."""
        least = {key: min(result[key] for result in self._counted) for key in self._counted[0]}
        generate, score, train = (least[phase] for phase in PHASES)
        if self._plan.run.max_staleness:
            best = max(generate, score, train)
        elif self._plan.run.reward_overlap_groups:
            best = max(generate, score) + train
        else:
            best = generate + score + train
        ratios = {"step / bound": least["step"] / best, "step / longest": least["step"] / max(generate, score, train)}
        return {**least, "lower bound": best, **ratios}

    def close(self) -> None:
        if self._launcher is not None:
            self._launcher.close()

    def _prompts(self, step: int) -> list[Any]:
        return [self._rows[index] for index in self._order.step(step)]


def measured(event: Event, wall: float) -> dict[str, float]:
    """With rollouts ahead, the phases of a step are those of the rollout it trains on, generated during the previous
    one."""
    metrics, phases = event.data["metrics"], event.data["phases"]
    result = {phase: metrics.get(f"{phase}_s", phases.get(phase, 0.0)) for phase in PHASES}
    return {**result, "step": wall, "staleness": metrics.get("staleness_max", 0.0)}


if __name__ == "__main__":
    main()
