"""Qwen-Image-Edit and Qwen-Image-Edit-Plus in vLLM-Omni and SGLang themselves, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from external_engines.edits import *
from external_engines.edits import check_edit_run, with_media
from external_engines.image_models import (
    started,
    test_a_full_sync_and_adapters_are_sampled_from_and_a_full_sync_ends_them,
)
from external_engines.latents import ROUNDING, Ask, asking, assert_same, gap, trainside
from qwen_image_editors import AREAS, Editor
from unirl.conformance.doubles.weight_updates import full_update, perturb
from unirl.core.errors import DataError, RecipeError
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.qwen_image.edit import QwenImageEditModel

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

__all__ = ["test_a_full_sync_and_adapters_are_sampled_from_and_a_full_sync_ends_them"]


ENGINES = ("sglang", "vllm-omni")
PROMPTS = ("make it red", "make it red", "put a blue square on the left of it")
"""The first two over different sources."""


@pytest.fixture
def model(editor: Editor) -> QwenImageEditModel:
    """The trained module with the weights of the checkpoint, to be modified by tests."""
    return editor.built()


@pytest.fixture
def edit(editor: Editor, model: QwenImageEditModel, tmp_path: Path) -> Ask:
    media = [editor.sources(tmp_path, number=number) for number in range(len(PROMPTS))]
    return asking(model, prompts=PROMPTS, media=lambda n: media[n], height=32, width=48, max_sequence_length=32)


@pytest.fixture
def ask(edit: Ask) -> Ask:
    return edit


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, editor: Editor) -> Iterator[ExternalLatentEngine]:
    with started(request.param, editor.built()) as result:
        yield result


def test_more_sources_than_the_model_takes_are_refused_by_their_number(
    engine: ExternalLatentEngine, model: QwenImageEditModel, editor: Editor, edit: Ask
) -> None:
    """Before anything is sent, and the engine continues to work. Several are for Qwen-Image-Edit-Plus."""
    engine.load_weights(full_update(model, version=1))
    request = edit(engine).select([0])
    (source, *_) = request.inputs.media[0]
    several = with_media(request, (source, source))
    if editor.name == "edit":
        with pytest.raises(DataError, match=r"got 2 media of role 'source', of which it needs one"):
            engine.generate(several)
    else:
        assert gap(engine.generate(several), model) < ROUNDING
    assert gap(engine.generate(request), model) < ROUNDING


def test_positions_that_sglang_never_gives_to_images_are_refused_before_it_starts(editor: Editor) -> None:
    with pytest.raises(RecipeError, match=r"engine: got model\.token_types=false; SGLang.*Set it to true"):
        started("sglang", editor.built(token_types=False)).__enter__()


def test_two_ranks_and_the_earliest_release_of_vllm_omni_edit_as_the_trainer_does(
    editor: Editor, model: QwenImageEditModel, edit: Ask
) -> None:
    """One of them with each of the two models, whose bridges share their code: two starts in place of four."""
    name, ranks = ("vllm-omni 0.30.0", 1) if editor.name == "edit" else ("vllm-omni", 2)
    with started(name, model, tensor_parallel=ranks) as engine:
        perturb(model, seed=1)
        engine.load_weights(full_update(model, version=1))
        request = edit(engine, guidance_mode="norm-corrected", guidance_scale=3.5, negative_prompt="blurred")
        result = engine.generate(request)
    assert gap(result, model) < ROUNDING
    assert_same(result, trainside(model, request))


def test_a_run_edits_images_with_ratio_1(
    engine: ExternalLatentEngine, model: QwenImageEditModel, editor: Editor, tmp_path: Path
) -> None:
    """Images of several sizes, by LoRA."""
    media = [editor.sources(tmp_path, number=number) for number in range(3)]
    words = [f"model.path={editor.folder}", "model.dtype=float32", "model.vae_dtype=float32"]
    words += [f"model.source_area={AREAS['source_area']}"]
    if editor.name == "edit-plus":
        words += [f"model.condition_area={AREAS['condition_area']}"]
    recipe = f"qwen-image-{editor.name}/flow-grpo"
    check_edit_run(recipe, words, engine=engine, model=model, media=media, folder=tmp_path)
