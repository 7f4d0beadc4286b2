"""Two sessions of one run, as a tracker sees them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from unirl.conformance.doubles.samples import make_samples
from unirl.core.observe.events import EventStream
from unirl.core.roles import RunInfo, Tracker
from unirl.core.types.media import Media

__all__ = ["CONFIG", "run_info", "two_sessions"]


CONFIG = {"run": {"max_steps": 4}, "algorithm": {"use": "flow-grpo", "betas": [0.9, 0.999]}}


def run_info(folder: Path, resumed_at: int | None = None) -> RunInfo:
    return RunInfo(name="first", folder=folder, plan_hash="abc", config=CONFIG, resumed_at=resumed_at)


def two_sessions(make: Callable[[], Tracker], folder: Path, *, shows: Callable[[Tracker], None]) -> None:
    """A run of four steps that is stopped after step 3 and resumed at 2, so that step 3 is done twice.

    shows: further samples of the first session, at step 2, after two videos.
    """
    for resumed_at in (None, 2):
        tracker = make()
        tracker.start(run_info(folder, resumed_at))
        events = EventStream()
        events.listen(tracker.event)
        for step in (1, 2, 3) if resumed_at is None else (3, 4):
            tracker.log({"reward_mean": step / 4, "a, b": 1.0}, step=step)
            images = Media(kind="image", values=torch.full((3, 3, 8, 8), step / 5))
            samples = make_samples(images, ["a cat", "a dog", "x"], [0.1, 0.2, 0.3])
            tracker.samples("eval", samples, step=step, lineage={})
        if resumed_at is None:
            frames = torch.linspace(0, 1, 4).view(4, 1, 1, 1).expand(2, 4, 3, 8, 8)
            clips = make_samples(Media(kind="video", values=frames, rate=5.0), ["clip", "other"])
            tracker.samples("clips", clips, step=2, lineage={})
            shows(tracker)
            events.emit("finding", step=2, text="small gradient")
        tracker.finish("done" if resumed_at else "stopped")
