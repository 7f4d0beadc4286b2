"""Text and images of one model in one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hunyuan_runs import IMAGE_ALONE, SMALL, run
from unirl.core.errors import PlanRejected
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.run import train

pytestmark = pytest.mark.slow


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
    words = ["sampling.guidance_scale=5", "sampling.guidance_mode=two-pass", "data.samples_per_prompt=3"]
    for step in run(tmp_path, tiny_folder, *IMAGE_ALONE, *words, recipe="hunyuan-image3/edit"):
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
