"""An algorithm may train on fewer rows than were sampled, and keep some of them together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from loop_toy import ToyAlgorithm, ToyBackend, parts, plan, run
from unirl.core.types.track import Track


class BestAndWorst(ToyAlgorithm):
    def advantages(self, track: Track) -> tuple[Track, Mapping[str, float]]:
        track, numbers = super().advantages(track)
        assert track.rewards is not None
        rewards = [float(reward) for reward in track.rewards]
        pairs = [
            (max(rows, key=rewards.__getitem__), min(rows, key=rewards.__getitem__)) for rows in track.groups().values()
        ]
        kept = track.select([row for pair in pairs for row in pair])
        return dataclasses.replace(kept, unit_ids=kept.group_ids), numbers


def test_the_backend_is_given_the_best_and_the_worst_of_each_group_as_units() -> None:
    backend = ToyBackend()
    toy = plan(groups=3, samples=4, run={"max_steps": 2})
    ran = run(parts(backend=backend, algorithm=BestAndWorst()), toy)  # type: ignore[arg-type]
    assert len(backend.trained) == 2
    for step, (track, event) in enumerate(zip(backend.trained, ran.steps, strict=True)):
        # Brightness rises with the number of a sample.
        groups = list(dict.fromkeys(track.group_ids))
        assert len(groups) == 3
        assert list(track.sample_ids) == [f"{group}/{number}" for group in groups for number in (3, 0)], step
        assert track.unit_ids == track.group_ids
        assert event.data["samples"] == 12, "all that were sampled"
