"""Counts denoiser forwards, their rows and stored bytes of a quickstart step, and compares them with the formulas."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from unirl.core.data.prompts import read_prompts
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import Job
from unirl.loop.build import build_parts
from unirl.loop.costs import latent_step_cost
from unirl.loop.requests import step_requests
from unirl.loop.scoring import score

CASES = {
    "quickstart": [],
    "serial replay, micro-batches of 48": ["train.replay=serial", "train.micro_batch_size=48"],
    "old log-probs from the engine": ["train.old_log_probs=engine"],
    "a window of 2 steps": ["sampling.sde.mode=window", "sampling.sde.window=2"],
    "guidance 2": ["sampling.guidance_scale=2.0"],
}


def main() -> None:
    catalog = Catalog.discover()
    print(f"{'case':38} {'rollout rows':>18} {'anchor + train rows':>22} {'stored bytes':>22}")
    for name, overrides in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            row = count(catalog, [*overrides, f"run.dir={Path(folder) / 'run'}"])
        print(f"{name:38} {row[0]:>18} {row[1]:>22} {row[2]:>22}")


def count(catalog: Catalog, overrides: list[str]) -> tuple[str, str, str]:
    """Counted/predicted of one step."""
    plan = compose("quickstart", overrides, catalog=catalog)
    parts = build_parts(plan, catalog=catalog)
    rows: Counter[str] = Counter()
    phase = "rollout"
    velocity = parts.only.model.velocity

    def counted(x, sigma, conditions):
        rows[phase] += int(x.shape[0])
        return velocity(x, sigma, conditions)

    parts.only.model.velocity = counted  # type: ignore[method-assign]  # the boundary that every forward crosses
    prompts = read_prompts(Path(plan.data.train))[: plan.data.prompts_per_step]
    (request,) = step_requests(parts, plan, prompts, step=0).values()
    predicted = latent_step_cost(
        request.latent,
        latent_shape=parts.only.model.latent_shape(request.latent.sampling),
        replayed_share=plan.only.train.replayed_share,
    )
    track = parts.only.engine.generate(request)
    segment = track.latent
    stored = int((segment.positions >= 0).sum()) * segment.latents[0, 0].numel() * segment.latents.element_size()
    phase = "train"
    track, _ = parts.only.algorithm.advantages(score(track, parts.rewards, parts.reward_weights))
    parts.only.backend.train([Job(track=track, algorithm=parts.only.algorithm)], progress=0.0)
    for part in (parts.only.engine, *parts.rewards.values(), parts.only.backend):
        part.close()
    training = predicted.old_log_prob_rows + predicted.train_rows
    pairs = (
        (rows["rollout"], predicted.rollout_rows),
        (rows["train"], training),
        (stored, predicted.stored_bytes),
    )
    assert all(result == expected for result, expected in pairs), pairs
    return tuple(f"{result} = {expected}" for result, expected in pairs)  # type: ignore[return-value]


if __name__ == "__main__":
    main()
