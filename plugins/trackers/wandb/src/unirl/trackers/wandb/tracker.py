"""The Weights & Biases tracker: one W&B run per run folder, resumed with it."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any, Literal

from unirl.core.observe.caption import captions
from unirl.core.roles import RunInfo
from unirl.core.specs.check import check_config
from unirl.core.types.event import Event
from unirl.core.types.media import Media
from unirl.core.types.track import Track
from unirl.tracker_host.animation import gif
from unirl.tracker_host.client_process import TrackerFailed
from unirl.tracker_host.client_tracker import kept_id
from unirl.tracker_host.shown import pixels, sample_table

import wandb

from .config import WandbConfig

__all__ = ["STEP", "WandbFailed", "WandbTracker", "build"]

STEP = "step"
"""The axis of every chart: steps completed. W&B's own counter only counts calls."""


class WandbFailed(TrackerFailed):
    """A W&B run could not be started."""


def build(config: WandbConfig) -> WandbTracker:
    """The tracker of this config. Raises RecipeError for an invalid setting."""
    check_config(config, key="tracker.wandb")
    return WandbTracker(config)


class WandbTracker:
    """Sends numbers over the axis `step`, images and videos with their captions, tables of texts and of samples beside
    their parents, and findings in the summary."""

    def __init__(self, config: WandbConfig) -> None:
        self._config = config
        self._open: wandb.Run | None = None
        self._findings: list[str] = []

    @property
    def _run(self) -> wandb.Run:
        assert self._open is not None, "start() comes first"
        return self._open

    def start(self, run: RunInfo) -> None:
        """Start the W&B run, or continue the one of this folder. Raises WandbFailed if W&B refuses, and TrackerFailed
        for an id other than the folder's."""
        settings = self._settings(run)
        mode, project = settings["mode"], settings["project"]
        kept = run.folder / "wandb" / "unirl-run.json"
        asked, resumed = settings.pop("run_id"), run.resumed_at is not None
        run_id = kept_id(kept, asked=asked, resumed=resumed, key="tracker.wandb")
        if mode != "disabled":
            # W&B would fall back to a temporary folder when it cannot make this one; here that is an error.
            kept.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._open = wandb.init(
                id=run_id,
                dir=settings.pop("root_dir"),
                config={**run.config, "plan_hash": run.plan_hash},
                # Offline files carry no resume; those of one id become one run when they are synced.
                resume="allow" if mode == "online" and run_id else None,
                # Without it a prompt at a terminal may silently switch to offline.
                force=mode == "online",
                # Otherwise a second run of this process, as in a sweep, would silently be the first one.
                reinit="create_new",
                settings=wandb.Settings(**settings),
            )
        except (wandb.Error, TimeoutError, OSError) as error:
            raise WandbFailed(
                f"mode {mode!r}, project {project!r}: W&B says: {str(error).rstrip('.')}. "
                + (
                    'Check the network and "wandb login", or set mode=offline and upload later with "wandb sync".'
                    if mode == "online"
                    else f"Check that {run.folder} can be written to and that wandb is fully installed."
                )
            ) from error
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        if mode != "disabled":
            kept.write_text(json.dumps({"id": self._run.id, "project": project}) + "\n", encoding="utf-8")

    def _settings(self, run: RunInfo) -> dict[str, Any]:
        """Settings of the W&B run: those of the recipe, then W&B's own, then our defaults."""
        config, own = self._config, wandb.setup().settings
        default = {
            "mode": "online",
            "project": "unirl",
            "run_name": run.name,
            "run_id": None,
            "root_dir": str(run.folder),
            "console": "off",
            "x_disable_stats": True,
        }
        recipe = {
            "mode": config.mode,
            "project": config.project,
            "entity": config.entity,
            "run_name": config.name,
            "run_id": config.run_id,
            "run_tags": tuple(config.tags),
            "init_timeout": config.init_timeout_s,
        }
        kept = {name: getattr(own, name) for name in own.model_fields_set & {*default, *recipe, "silent"}}
        result = default | kept | {name: value for name, value in recipe.items() if value}
        return {"silent": result["mode"] != "online", **result}

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if STEP in metrics:
            raise ValueError(f"metrics: {STEP!r} is the name of the axis; give the number another name.")
        self._run.log({STEP: step, **{key: float(value) for key, value in metrics.items()}})

    def samples(self, key: str, track: Track, *, step: int, lineage: Mapping[str, Media]) -> None:
        """Send the first images or videos under `key`, each with its caption, or the first completions as the table
        `<key>/texts`. With parents, there is a table `<key>/samples` of images and videos too, which shows them beside
        the prompt and the parents."""
        media, name = track.media, track.name if lineage else "text"
        if media is None or media.kind == "audio":
            return
        is_text = media.kind == "text"
        limit = self._config.max_texts if is_text else self._config.max_images
        shown = track.select(range(min(limit, track.num_rows)))
        if is_text:
            self._run.log({STEP: step, f"{key}/texts": _table(shown, lineage, name=name)})
            return
        sent = [_cell(media, row, caption=caption) for row, caption in enumerate(captions(shown))]
        self._run.log({STEP: step, key: sent})
        if lineage:
            self._run.log({STEP: step, f"{key}/samples": _table(shown, lineage, name=name)})

    def event(self, event: Event) -> None:
        if event.kind == "finding":
            self._findings.append(f"step {event.step}: {event.data['text']}")
            self._run.summary["findings"] = list(self._findings)

    def finish(self, status: Literal["done", "stopped", "failed"]) -> None:
        """End the W&B run. A stopped run is not a failure: it can be resumed."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=1 if status == "failed" else 0)


def _table(track: Track, lineage: Mapping[str, Media], *, name: str) -> wandb.Table:
    """One row per sample: prompt, parents from the root down, the sample itself as column `name`, reward, and whether a
    length limit ended it."""
    assert track.media is not None
    columns, rows = sample_table(track, {**lineage, name: track.media}, cell=_cell)
    table = wandb.Table(columns=[*columns])
    for row in rows:
        table.add_data(*row)
    return table


def _cell(media: Media, row: int, *, caption: str | None = None) -> Any:
    """Value that W&B shows for one sample; None for audio."""
    if media.kind == "text":
        return media.texts[row]
    if media.kind == "audio":
        return None
    content = pixels(media.array(row)).numpy()
    if media.rate is None:
        return wandb.Image(content, caption=caption)
    # Of frames, W&B itself would need moviepy to make a video.
    return wandb.Video(io.BytesIO(gif(content, rate=media.rate)), caption=caption, format="gif")
