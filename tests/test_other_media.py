"""Tracks whose medium is not that of their kind: latents that become sound, tokens that become images."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import other_media
import pytest
from unirl.core.errors import RunFailed
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.types.media import Media
from unirl.loop.run import train

PROMPTS = "\n".join(["a drum", "a flute", "rain", "a bell"])
RECIPE = """
defaults:
  - /unirl
  - /model: MODEL
  - /backend: fsdp2
  - /engine: trainside
  - /algorithm: ALGORITHM
  - /sampling: SAMPLING
  - /reward@reward.score: REWARD
  - _self_
backend: {trains: full, lr: 3e-2, max_grad_norm: null}
data: {train: PROMPTS, eval: PROMPTS, prompts_per_step: 4, samples_per_prompt: 8}
eval: {every: 2}
run: {max_steps: 4, media_every: 2, threads: 1, dir: DIR}
"""
LATENT = ("tiny-sound", "flow-grpo", "latent", "loudness")
TOKENS = ("tiny-mosaic", "grpo", "text", "greyness")
SMALL = {
    "latent": ["sampling.num_inference_steps=4", "sampling.height=16", "sampling.width=16", "algorithm.clip_range=0.2"],
    "text": ["sampling.chat=false", "sampling.max_new_tokens=8"],
}


@pytest.fixture
def catalog() -> Iterator[Catalog]:
    yield Catalog.discover(files=[Path(other_media.__file__)])
    sys.modules["other_media"] = other_media


def composed(catalog: Catalog, folder: Path, parts: tuple[str, str, str, str], *words: str):
    (folder / "prompts.txt").write_text(PROMPTS, encoding="utf-8")
    text = RECIPE.replace("PROMPTS", str(folder / "prompts.txt")).replace("DIR", str(folder / "run"))
    for name, value in zip(("MODEL", "ALGORITHM", "SAMPLING", "REWARD"), parts, strict=True):
        text = text.replace(name, value)
    file = folder / "recipe.yaml"
    file.write_text(text, encoding="utf-8")
    return compose(str(file), [*SMALL[parts[2]], *words], catalog=catalog)


@pytest.mark.parametrize("parts", [LATENT, TOKENS], ids=["sound", "tokens"])
def test_a_track_of_another_medium_is_scored_trained_and_evaluated(
    catalog: Catalog, parts: tuple[str, str, str, str], tmp_path: Path
) -> None:
    plan = composed(catalog, tmp_path, parts)
    assert match(plan, catalog=catalog).reasons == ()
    assert plan.only.medium == {"latent": "audio", "text": "image"}[parts[2]]
    train(plan, catalog=catalog)
    lines = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    scores = [line["metrics"]["score_mean"] for line in lines if line["kind"] == "evaluated"]
    assert len(scores) == 3
    # The mean square rises: the same noise each time, so nothing but the weights differs.
    assert scores[0] < scores[1] < scores[2]
    steps = [line["metrics"] for line in lines if line["kind"] == "step"]
    assert [step["ratio_max_dev_first"] for step in steps] == [0.0] * 4


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (
            (*LATENT[:3], "brightness"),
            "reward.score: reward 'brightness' scores image; model 'tiny-sound' generates audio tracks.",
        ),
        (
            (*TOKENS[:3], "loudness"),
            "reward.score: reward 'loudness' scores audio; model 'tiny-mosaic' generates image tracks.",
        ),
    ],
)
def test_a_reward_of_another_medium_is_refused(
    catalog: Catalog, parts: tuple[str, str, str, str], says: str, tmp_path: Path
) -> None:
    (reason,) = match(composed(catalog, tmp_path, parts), catalog=catalog).reasons
    assert str(reason).startswith(says)


def test_media_of_another_kind_than_the_spec_states_are_an_error(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build = other_media.mosaic

    def lying(config: other_media.Nothing, *, device: object):
        model = build(config, device=device)
        model.media_of = lambda tokens, *, sampling: Media(kind="text", values=("",) * len(tokens))
        return model

    plan = composed(catalog, tmp_path, TOKENS)
    monkeypatch.setattr(sys.modules["other_media"], "mosaic", lying)
    with pytest.raises(RunFailed, match=r"media_of\(\) gave 4 text of 4 completions; its spec states image"):
        train(plan, catalog=catalog)
