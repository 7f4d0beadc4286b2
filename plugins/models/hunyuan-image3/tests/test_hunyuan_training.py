"""Text and images of one model in one optimizer step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import small_runs
from unirl.core.errors import PlanRejected
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.run import train
from unirl.models.hunyuan_image3 import tiny

pytestmark = pytest.mark.slow

SMALL = [
    "data.train=prompts.jsonl", "run.max_steps=2", "run.media_every=0", "run.threads=1", "model.dtype=float32",
    "model.vision_dtype=float32", "data.prompts_per_step=2", "stages.think.samples=2", "stages.image.samples=2",
    "sampling.think.max_new_tokens=4", "sampling.image.height=64", "sampling.image.width=48",
    "sampling.image.num_inference_steps=4", "sampling.image.sde={mode: fraction, last: 0.5}",
    "backend.mixed_precision=none", "backend.activation_checkpointing=false", "eval.every=0",
    "train.micro_batch_size=2",
]  # fmt: skip
"""The recipe on a miniature, in fp32. A micro-batch of two rows; two updates on a rollout."""


def run(
    folder: Path, checkpoint: Path, *words: str, recipe: str = "hunyuan-image3/think-recaption"
) -> list[Mapping[str, Any]]:
    """Metrics of each step. Prompts of one text: one with an image, one with two, of other sizes."""
    rows = [
        {
            "prompt": "make it red",
            "media": [{"modality": "image", "role": "source", "uri": Path(ref.uri).name} for ref in refs],
        }
        for refs in (tiny.media(folder, number=number) for number in (0, 2))
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = small_runs.run(folder / "out", f"model.path={checkpoint}", *words, recipe=recipe, small=())
    return list(small_runs.steps(result.folder).values())


@pytest.fixture(scope="module")
def plain(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Mapping[str, Any]]:
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return run(folder, tiny_folder, *SMALL, "backend.trains=full")


def test_a_thought_and_its_image_train_in_one_step_at_ratio_1(plain: list[Mapping[str, Any]]) -> None:
    """From source images of different sizes. The first ratio is that of two forwards of the same batch: exactly 1. The
    rollout had other batches, and a cache: rounding of a forward, in log-probs of some nats."""
    assert len(plain) == 2
    for step in plain:
        for track in ("think", "image"):
            assert step[f"{track}/ratio_max_dev_first"] == 0
            assert step[f"{track}/logp_mismatch_max"] <= 1e-5
            assert step[f"{track}/grad_norm"] > 0 and step[f"{track}/ratio_max_dev"] > 0


def test_a_sharded_model_trains_as_a_plain_one(
    plain: list[Mapping[str, Any]], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP gathers the weights of the root in its forward alone: whatever went past it would fail here."""
    monkeypatch.chdir(tmp_path)
    sharded = run(tmp_path, tiny_folder, *SMALL, "backend.trains=full", "backend.shard=always")
    for mine, its in zip(sharded, plain, strict=True):
        # The same operations on the same numbers.
        assert {name: value for name, value in mine.items() if not name.startswith("perf/")} == {
            name: value for name, value in its.items() if not name.startswith("perf/")
        }


def test_edited_images_alone_train_with_adapters_and_guidance(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for word in SMALL if "think" not in word and not word.startswith("stages.")]
    words = [word.replace("sampling.image.", "sampling.") for word in words]
    words += ["sampling.guidance_scale=5", "sampling.guidance_mode=two-pass", "data.samples_per_prompt=3"]
    for step in run(tmp_path, tiny_folder, *words, recipe="hunyuan-image3/edit"):
        assert step["logp_mismatch_max"] <= 1e-5 and step["grad_norm"] > 0


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("sampling.think.system_prompt=other", r"sampling\.image\.options\.system_prompt: got '', expected 'other'"),
        ("sampling.think.options.begin=recaption", r"sampling\.image\.options\.begin: got 'think', expected 'recapt"),
        ("sampling.image.width=80", r"sampling\.image\.width: got 64 x 80 \(height x width\), which the checkpoint"),
    ],
)
def test_stages_that_do_not_fit_are_refused(tiny_folder: Path, word: str, message: str) -> None:
    catalog = Catalog.discover()
    with pytest.raises(PlanRejected, match=message):
        words = [f"model.path={tiny_folder}", *SMALL, word]
        train(compose("hunyuan-image3/think-recaption", words, catalog=catalog), catalog=catalog)
