"""The Weights & Biases tracker: one W&B run per run folder, resumed with it."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from PIL import Image
from unirl.core.errors import RecipeError, UniRLError
from unirl.core.observe.caption import Caption
from unirl.core.roles import RunInfo
from unirl.core.specs.check import check_config
from unirl.core.types.array import Array
from unirl.core.types.event import Event
from unirl.core.types.media import Media

import wandb

from .config import WandbConfig

__all__ = ["STEP", "WandbFailed", "WandbTracker", "build"]

STEP = "step"
"""The axis of every chart: steps completed. W&B's own counter only counts calls."""


TEXT_COLUMNS = ("prompt", "text", "reward", "truncated")
"""Columns of a table of texts."""


class WandbFailed(UniRLError):
    """A W&B run could not be started."""


def build(config: WandbConfig) -> WandbTracker:
    """The tracker of this config. Raises RecipeError for an invalid setting."""
    check_config(config, key="tracker.wandb")
    if not config.project:
        raise RecipeError("tracker.wandb.project: got an empty name; name the W&B project of the run.")
    return WandbTracker(config)


class WandbTracker:
    """Sends numbers over the axis `step`, images and videos with their captions, tables of texts, and findings in the
    summary."""

    def __init__(self, config: WandbConfig) -> None:
        self._config = config
        self._open: wandb.Run | None = None
        self._findings: list[str] = []

    @property
    def _run(self) -> wandb.Run:
        assert self._open is not None, "start() comes first"
        return self._open

    def start(self, run: RunInfo) -> None:
        """Start the W&B run, or continue the one of this folder. Raises WandbFailed if W&B refuses."""
        config = self._config
        online = config.mode == "online"
        kept = run.folder / "wandb" / "unirl-run.json"
        run_id = self._id_to_use(kept, resumed=run.resumed_at is not None)
        if config.mode != "disabled":
            # W&B would fall back to a temporary folder when it cannot make this one; here that is an error.
            kept.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._open = wandb.init(
                project=config.project,
                entity=config.entity or None,
                name=config.name or run.name,
                id=run_id,
                tags=list(config.tags),
                mode=config.mode,  # pyright: ignore[reportArgumentType] - checked against MODES by `build`
                dir=str(run.folder),
                config={**run.config, "plan_hash": run.plan_hash},
                # Offline files carry no resume; those of one id become one run when they are synced.
                resume="allow" if online and run_id else None,
                # Without it a prompt at a terminal may silently switch to offline.
                force=online,
                # Otherwise a second run of this process, as in a sweep, would silently be the first one.
                reinit="create_new",
                settings=wandb.Settings(
                    console="off", x_disable_stats=True, silent=not online, init_timeout=config.init_timeout_s
                ),
            )
        except (wandb.Error, TimeoutError, OSError) as error:
            raise WandbFailed(
                f"mode {config.mode!r}, project {config.project!r}: W&B says: {str(error).rstrip('.')}. "
                + (
                    'Check the network and "wandb login", or set tracker.wandb.mode=offline and upload later '
                    'with "wandb sync".'
                    if online
                    else f"Check that {run.folder} can be written to and that wandb is fully installed."
                )
            ) from error
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        if config.mode != "disabled":
            kept.write_text(json.dumps({"id": self._run.id, "project": config.project}) + "\n", encoding="utf-8")

    def _id_to_use(self, kept: Path, *, resumed: bool) -> str | None:
        asked = self._config.run_id or None
        if not resumed or not kept.exists():
            return asked
        try:
            result = str(json.loads(kept.read_text(encoding="utf-8"))["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise WandbFailed(
                f"{kept} does not hold a W&B run id ({error}). Delete it to go on as a new W&B run, "
                'or write {"id": "<run id>"} into it.'
            ) from error
        if asked not in (None, result):
            raise WandbFailed(
                f"tracker.wandb.run_id: got {asked!r}, but this run folder belongs to W&B run {result!r}. "
                "Leave run_id empty to continue that one."
            )
        return result

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if STEP in metrics:
            raise ValueError(f"metrics: {STEP!r} is the name of the axis; give the number another name.")
        self._run.log({STEP: step, **{key: float(value) for key, value in metrics.items()}})

    def samples(self, key: str, media: Media, captions: Sequence[str], *, step: int) -> None:
        """Send the first images or videos under `key`, each with its caption, or the first completions as the table
        `<key>/texts`, one row per sample."""
        if len(captions) != len(media):
            raise ValueError(f"samples {key!r}: got {len(captions)} captions for {len(media)}, expected one of each.")
        if media.kind == "text":
            self._run.log({STEP: step, f"{key}/texts": self._table(media.texts, captions)})
        elif media.kind != "audio":
            shown = list(zip(media.arrays[: self._config.max_images], captions, strict=False))
            if media.rate is None:
                sent = [wandb.Image(_pixels(image).numpy(), caption=caption) for image, caption in shown]
            else:
                sent = [
                    wandb.Video(_gif(video, rate=media.rate), caption=caption, format="gif") for video, caption in shown
                ]
            self._run.log({STEP: step, key: sent})

    def _table(self, texts: Sequence[str], captions: Sequence[str]) -> wandb.Table:
        table = wandb.Table(columns=list(TEXT_COLUMNS))
        for text, caption in zip(texts[: self._config.max_texts], captions, strict=False):
            read = Caption.parse(caption)
            table.add_data(read.prompt, text, read.reward, read.is_truncated)
        return table

    def event(self, event: Event) -> None:
        if event.kind == "finding":
            self._findings.append(f"step {event.step}: {event.data['text']}")
            self._run.summary["findings"] = list(self._findings)

    def finish(self, status: Literal["done", "stopped", "failed"]) -> None:
        """End the W&B run. A stopped run is not a failure: it can be resumed."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=1 if status == "failed" else 0)


def _pixels(images: Array) -> Array:
    """uint8 [..., H, W, 3] of [..., 3, H, W] in [0, 1]."""
    return (images.detach().float().clamp(0, 1) * 255).round().byte().movedim(-3, -1).cpu()


def _gif(video: Array, *, rate: float) -> io.BytesIO:
    """A video [F, 3, H, W] as an animation: W&B itself would need moviepy to encode it."""
    first, *others = (Image.fromarray(frame.numpy()) for frame in _pixels(video))
    content = io.BytesIO()
    first.save(content, format="GIF", save_all=True, append_images=others, duration=round(1000 / rate), loop=0)
    content.seek(0)
    return content
