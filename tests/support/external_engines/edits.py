"""Tests for every latent engine that runs a model from source images: a model's test module imports all of them.

The module has the fixtures of `image_models`, and `edit`, which asks for samples of prompts with source images in at
least two sizes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from unirl.conformance.doubles.weight_updates import full_update
from unirl.core.errors import DataError, EchoMismatch
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import DiffusionModel
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import Request
from unirl.engine_host import latent_engine
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.engine_host.sent_media import SentMedia, sent_media
from unirl.loop.run import train

from .image_models import recipe_words
from .latents import ROUNDING, Ask, assert_same, gap, trainside
from .lent import lent

__all__ = [
    "test_a_picture_of_another_prompt_is_missed_in_the_reply",
    "test_edits_are_those_that_the_trainer_would_have_made",
    "test_other_sources_make_another_image",
    "test_sources_that_cannot_be_read_or_are_missing_are_refused_before_anything_is_sent",
]


def with_media(request: Request, *media: tuple[MediaRef, ...]) -> Request:
    """The request with these media for its rows."""
    return dataclasses.replace(request, inputs=dataclasses.replace(request.inputs, media=media))


def check_edit_run(
    recipe: str,
    words: Sequence[str],
    *,
    engine: ExternalLatentEngine,
    model: DiffusionModel,
    media: Sequence[Sequence[MediaRef]],
    folder: Path,
) -> None:
    """Two steps of one instruction over several sources, on an engine that was `started` and gets the weights. media: of
    each prompt.  folder: where the run is; the sources are in it."""
    rows = [
        {
            "prompt": "make it red",
            "media": [{"modality": "image", "role": "source", "uri": Path(ref.uri).name} for ref in refs],
        }
        for refs in media
    ]
    (folder / "edits.jsonl").write_text("\n".join(map(json.dumps, rows)))
    every = [
        f"data.train={folder}/edits.jsonl", f"run.dir={folder}/out", "run.max_steps=2",
        f"data.prompts_per_step={len(rows)}", "data.samples_per_prompt=4", "sampling.height=32", "sampling.width=48",
        "sampling.max_sequence_length=32", "sampling.num_inference_steps=4", "sampling.sde.count=2",
        "backend.mixed_precision=none", "backend.activation_checkpointing=false", "model.text_dtype=float32",
        "eval.every=0",
    ]  # fmt: skip
    catalog = Catalog.discover()
    plan = compose(recipe, [*every, *recipe_words(engine), *words], catalog=catalog)
    with lent(engine, model):
        train(plan, catalog=catalog)
    events = [json.loads(line) for line in (folder / "out" / "events.jsonl").read_text().splitlines()]
    steps = [event["metrics"] for event in events if event["kind"] == "step"]
    assert len(steps) == 2 and all(step["grad_norm"] > 0 for step in steps)
    assert all(step["logp_mismatch_max"] <= ROUNDING for step in steps)


@pytest.mark.parametrize("scale", [1.0, 3.5], ids=["plain", "guided"])
def test_edits_are_those_that_the_trainer_would_have_made(
    engine: ExternalLatentEngine, model: DiffusionModel, edit: Ask, scale: float
) -> None:
    """With log-probs at which the first ratio is 1, sources of several sizes in one batch, and their conditions."""
    engine.load_weights(full_update(model, version=1))
    guided: dict[str, Any] = {
        "guidance_mode": "two-pass",
        "guidance_scale": scale,
        "negative_prompt": "blurred, in grey",
    }
    request = edit(engine, **(guided if scale > 1 else {}))
    result = engine.generate(request)
    assert result.inputs == request.inputs
    assert gap(result, model) < ROUNDING
    assert_same(result, trainside(model, request))


def test_other_sources_make_another_image(engine: ExternalLatentEngine, model: DiffusionModel, edit: Ask) -> None:
    """The same prompts and noise, with the sources of two prompts swapped."""
    engine.load_weights(full_update(model, version=1))
    request = edit(engine).select([0, 2])
    first, second = request.inputs.media
    swapped = with_media(request, second, first)
    before, after = engine.generate(request), engine.generate(swapped)
    # A hundred times what rounding accounts for.
    moved = (before.latent.final - after.latent.final).abs().flatten(1).amax(dim=1)
    assert bool((moved > 100 * ROUNDING).all()), moved
    assert_same(after, trainside(model, swapped))


def test_a_picture_of_another_prompt_is_missed_in_the_reply(
    engine: ExternalLatentEngine, model: DiffusionModel, edit: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs and ratios would not show it: training takes the conditions that come back."""
    engine.load_weights(full_update(model, version=1))
    request = edit(engine).select([0, 2])

    @contextlib.contextmanager
    def swapping(inputs: Inputs, *, folder: str) -> Iterator[SentMedia]:
        with sent_media(inputs, folder=folder) as sent:
            one, other = (Path(media[0].uri) for media in sent.inputs.media)
            content = one.read_bytes()
            one.write_bytes(other.read_bytes())
            other.write_bytes(content)
            yield sent

    with monkeypatch.context() as patched:
        patched.setattr(latent_engine, "sent_media", swapping)
        with pytest.raises(EchoMismatch, match=r"sources of row 0: the request says .*sha256:.*, .* used .*sha256:"):
            engine.generate(request)
    assert gap(engine.generate(request), model) < ROUNDING


def test_sources_that_cannot_be_read_or_are_missing_are_refused_before_anything_is_sent(
    engine: ExternalLatentEngine, model: DiffusionModel, edit: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.load_weights(full_update(model, version=1))
    request = edit(engine).select([0, 2])
    first = request.inputs.media[0]
    gone = (dataclasses.replace(first[0], uri=str(tmp_path / "gone.png")),)
    other = (dataclasses.replace(first[0], role="condition"),)
    none = (
        "got no media of role 'source', of which it needs one"
        if model.spec.needs_media
        else "got 0 source images, where sample"
    )
    process: Any = engine._process
    with monkeypatch.context() as patched:
        patched.setattr(process, "call", lambda *_, **__: pytest.fail("something was sent"))
        for media, message in ((gone, "it cannot be opened"), ((), none), (other, "got media of role 'condition'")):
            with pytest.raises(DataError, match=message):
                engine.generate(with_media(request, first, media))
    assert gap(engine.generate(request), model) < ROUNDING
