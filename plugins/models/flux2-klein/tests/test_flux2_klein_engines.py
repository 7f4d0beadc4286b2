"""FLUX.2 [klein] in SGLang and vLLM-Omni themselves, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import Flux2KleinPipeline
from external_engines.edits import *
from external_engines.edits import check_edit_run, with_media
from external_engines.image_models import *
from external_engines.image_models import ENGINES, started
from external_engines.latents import ROUNDING, Ask, asking, assert_same, gap, trainside
from PIL import Image
from unirl.conformance.doubles.weight_updates import full_update
from unirl.core.errors import RunFailed
from unirl.core.types.data import MediaRef
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.models.flux2_klein import tiny
from unirl.models.flux2_klein.bridges.sglang import BRIDGE
from unirl.models.flux2_klein.config import Flux2KleinConfig
from unirl.models.flux2_klein.model import Flux2KleinModel, build

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PROMPTS = ("a red ring", "a blue square on the left of two green discs", "")
"""The second is longer than its conditions."""


@pytest.fixture
def model(tiny_folder: Path) -> Flux2KleinModel:
    """The trained module with the weights of the checkpoint, to be modified by tests."""
    return build(Flux2KleinConfig(path=str(tiny_folder)), device="cpu")


@pytest.fixture
def ask(model: Flux2KleinModel) -> Ask:
    return asking(model, prompts=PROMPTS, height=32, width=48, max_sequence_length=48)


@pytest.fixture
def edit(model: Flux2KleinModel, tmp_path: Path) -> Ask:
    """One source for the first two prompts, two for the third, none of one size."""
    media = [tiny.media(tmp_path, number=number) for number in range(len(PROMPTS))]
    return asking(model, prompts=PROMPTS, media=lambda n: media[n], height=32, width=48, max_sequence_length=48)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tiny_folder: Path) -> Iterator[ExternalLatentEngine]:
    with started(request.param, build(Flux2KleinConfig(path=str(tiny_folder)), device="cpu")) as result:
        yield result


@pytest.mark.parametrize("name", ["sglang", "vllm-omni"])
def test_a_distilled_checkpoint_is_sampled_without_guidance(name: str, tmp_path: Path) -> None:
    tiny.write(tmp_path / "distilled", seed=1, is_distilled=True)
    model = build(Flux2KleinConfig(path=str(tmp_path / "distilled")), device="cpu")
    with started(name, model) as engine:
        engine.load_weights(full_update(model, version=1))
        request = asking(model, prompts=PROMPTS, height=64, width=48, max_sequence_length=48)(engine)
        result = engine.generate(request)
    assert gap(result, model) < ROUNDING
    assert_same(result, trainside(model, request))


def test_prompts_that_sglang_pads_its_own_way_are_caught_at_its_start(
    model: Flux2KleinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 512 tokens, whatever the request says: with SGLang's own config in place of the bridge's."""
    stock = "sglang.multimodal_gen.configs.pipeline_configs.flux:Flux2KleinBasePipelineConfig"
    kind = type(BRIDGE)
    (tmp_path / "stock_bridge.py").write_text(
        f"from {kind.__module__} import {kind.__name__}\n"
        f"class Stock({kind.__name__}):\n    pipeline_config = {stock!r}\n"
        "BRIDGE = Stock()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("unirl.engines.sglang.engine.fitting_bridge", lambda *_: ("stock_bridge:BRIDGE", BRIDGE))
    with pytest.raises(RunFailed, match=r"conditions\['positive'\]\['prompt_embeds'\]: .*got shape \[\d, 512,"):
        started("sglang", model).__enter__()


def test_ranks_that_would_split_a_layer_of_several_parts_are_refused(model: Flux2KleinModel) -> None:
    with pytest.raises(RunFailed, match=r"ff\.linear_in.* has several parts.*Set engine\.tensor_parallel=1"):
        started("vllm-omni", model, tensor_parallel=2).__enter__()


def test_images_that_the_pipeline_does_not_take_are_refused_by_name(
    engine: ExternalLatentEngine, model: Flux2KleinModel, edit: Ask, tmp_path: Path
) -> None:
    """And the engine continues to work."""
    engine.load_weights(full_update(model, version=1))
    request = edit(engine).select([0])
    Image.new("RGB", (63, 80)).save(tmp_path / "narrow.png")
    narrow = MediaRef(modality="image", role="source", uri=str(tmp_path / "narrow.png"))
    with pytest.raises(RunFailed, match=r"Image too small: 63.80"):
        engine.generate(with_media(request, (narrow,)))
    assert gap(engine.generate(request), model) < ROUNDING


def test_edits_of_several_sizes_join_a_batch_between_steps(model: Flux2KleinModel, edit: Ask) -> None:
    with started("vllm-omni", model, step_batching=True) as engine:
        engine.load_weights(full_update(model, version=1))
        request = edit(engine)
        result = engine.generate(request)
        assert max(engine.batches) > 1
    assert gap(result, model) < ROUNDING
    assert_same(result, trainside(model, request))


def test_in_bf16_edits_of_vllm_omni_equal_those_of_the_trainer_to_its_own_rounding(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """From a checkpoint in bf16, as published: encoder and VAE stay in its dtype. Latents and log-probs in bf16 are off
    from those in fp32 with the same weights, most by the rounded timestep, which both round alike; sums of another
    order are a fraction of that, measured 1/19 and 1/40."""
    Flux2KleinPipeline.from_pretrained(tiny_folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    dtypes = dict.fromkeys(("dtype", "text_dtype", "vae_dtype"), "bfloat16")
    model, exact = (
        build(Flux2KleinConfig(path=str(tmp_path / "half"), **chosen), device="cpu") for chosen in (dtypes, {})
    )
    media = [tiny.media(tmp_path, number=number) for number in range(len(PROMPTS))]
    ask = asking(model, prompts=PROMPTS, media=lambda n: media[n], height=32, width=48, max_sequence_length=48)
    with started("vllm-omni", model) as engine:
        engine.load_weights(full_update(model, version=1))
        request = ask(engine)
        result = engine.generate(request)
    expected, in_fp32 = (trainside(each, request).latent.final for each in (model, exact))
    assert (result.latent.final - expected).abs().mean() < (expected - in_fp32).abs().mean() / 4
    assert gap(result, model) < gap(result, exact) / 4


def test_a_run_edits_images_with_ratio_1(
    engine: ExternalLatentEngine, model: Flux2KleinModel, tiny_folder: Path, tmp_path: Path
) -> None:
    """Images of several sizes, one of the prompts with two, by LoRA."""
    media = [tiny.media(tmp_path, number=number) for number in range(3)]
    words = [f"model.path={tiny_folder}", "train.micro_batch_size=2"]
    check_edit_run("flux2-klein/flow-grpo", words, engine=engine, model=model, media=media, folder=tmp_path)
