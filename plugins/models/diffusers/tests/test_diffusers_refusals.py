"""Bad input of every kind: one clear error, the key first."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import as_hub_id, cut
from unirl.core.errors import DataError, RecipeError
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig, ScheduleConfig
from unirl.models.diffusers.config import DiffusersConfig
from unirl.models.diffusers.model import DiffusersModel, build
from unirl.models.diffusers.rows import RowTimestep
from unirl.numerics.media import LoadedImage

SAMPLING = LatentSamplingConfig(num_inference_steps=4, height=64, width=96, max_sequence_length=32)


def change(file: str, **values: object) -> Callable[[Path], None]:
    """Set keys of a JSON file of the checkpoint; None takes one out."""

    def done(folder: Path) -> None:
        path = folder / file
        content = {**json.loads(path.read_text()), **values}
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return done


def language_model(folder: Path) -> None:
    (folder / "model_index.json").unlink()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))


def sharded(folder: Path) -> None:
    index = {"weight_map": {"a": "diffusion_pytorch_model-00001-of-00002.safetensors"}}
    (folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


def another_scheduler(predicts: str) -> Callable[[Path], None]:
    config = {"_class_name": "DDIMScheduler", "prediction_type": predicts, "num_train_timesteps": 1000}
    return lambda folder: (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, r"there is no folder .* and it is not a hub id either"),
        (
            lambda folder: (folder / "model_index.json").unlink(),
            r"has no model_index\.json.* Give the folder that holds",
        ),
        (language_model, r"It is a language model, LlamaForCausalLM: use model=causal-lm\."),
        (change("model_index.json", _class_name="AcmePipeline"), r"is a checkpoint of 'AcmePipeline', which diffusers"),
        (change("model_index.json", transformer=None), r"has no transformer among its components"),
        (
            change("model_index.json", transformer_2=["diffusers", "FluxTransformer2DModel"]),
            r"has two transformers, for high and for low noise, expected one",
        ),
        (lambda folder: shutil.rmtree(folder / "vae"), r"lacks vae/"),
        (lambda folder: (folder / "tokenizer_2" / "tokenizer.json").unlink(), r"has no vocabulary in tokenizer_2/"),
        (sharded, r"names 1 files, of which 1 are missing, the first is 'diffusion_pytorch_model-00001-of-00002"),
        (
            another_scheduler("epsilon"),
            r"prediction_type 'epsilon': its model predicts the noise, expected a flow-match",
        ),
        (another_scheduler("v_prediction"), r"prediction_type 'v_prediction': its model predicts v, expected a flow-m"),
        (lambda folder: (folder / "scheduler" / "scheduler_config.json").write_text("{"), r"cannot be read as JSON"),
        (lambda folder: cut(folder / "transformer"), r"a component does not load"),
    ],
    ids=[
        "absent",
        "no-index",
        "language-model",
        "unknown-pipeline",
        "no-transformer",
        "two-experts",
        "no-vae",
        "no-tokens",
        "missing-shard",
        "epsilon",
        "v-prediction",
        "bad-scheduler",
        "cut",
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_clear_error(
    tmp_path: Path, tiny_folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_folder, folder)
    damage(folder)
    with pytest.raises(RecipeError, match=message) as caught:
        build(DiffusersConfig(path=str(folder)), device="cpu")
    assert str(caught.value).startswith("model.path: ")


def test_a_single_file_is_refused_with_the_way_to_a_folder(tmp_path: Path) -> None:
    (file := tmp_path / "flux.safetensors").write_bytes(b"")
    with pytest.raises(RecipeError, match=r"^model\.path: got the single file .*from_single_file"):
        build(DiffusersConfig(path=str(file)), device="cpu")


def test_a_hub_id_that_is_not_there_is_refused_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError, match=r"^model\.path: .*'acme/none'.* log in if the model is gated"):
        build(DiffusersConfig(path="acme/none"), device="cpu")


def test_a_hub_id_has_the_weights_of_the_local_path(
    tiny_folder: Path, model: DiffusersModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = build(DiffusersConfig(path=as_hub_id(tiny_folder, tmp_path, monkeypatch)), device="cpu")
    state = fetched.trainable.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in model.trainable.state_dict().items())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"guidance_scal": 2.0}, r"^model\.call\.guidance_scal: FluxPipeline has no such .* Nearest: guidance_scale"),
        ({"height": 64}, r"^model\.call\.height: `sampling` and the prompts set it"),
        ({"true_cfg_scale": 2.0, "negative_prompt": "blurred"}, r"is run for 6 rows in 3 steps of one prompt"),
    ],
)
def test_an_argument_of_the_call_that_does_not_fit_is_refused(
    tiny_folder: Path, call: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        build(DiffusersConfig(path=str(tiny_folder), call=call), device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"height": 65}, r"^sampling\.height: got 65, expected a multiple of 16\. Nearest: 64 or 80\."),
        ({"width": 8}, r"^sampling\.width: got 8, expected a multiple of 16\. Nearest: 16\."),
        ({"frames": 5}, r"^sampling\.frames: got 5, expected 1: the model generates single images"),
        ({"schedule": ScheduleConfig(shift=3.0)}, r"^sampling\.schedule: got .*shift=3\.0.*/scheduler_config\.json"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(model: DiffusersModel, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        model.schedule(dataclasses.replace(SAMPLING, **changes))


def test_frames_off_the_grid_are_refused_with_those_that_fit(load: Callable[..., DiffusersModel]) -> None:
    with pytest.raises(
        RecipeError, match=r"^sampling\.frames: got 8, expected a multiple of 4 plus 1\. Nearest: 5 or 9\."
    ):
        load("WanPipeline").latent_shape(dataclasses.replace(SAMPLING, frames=8))


def test_a_pipeline_that_needs_other_media_is_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(folder("WanPipeline"), tmp_path / "wan")
    change("model_index.json", _class_name="LucyEditPipeline")(tmp_path / "wan")
    with pytest.raises(RecipeError, match=r"^model\.path: LucyEditPipeline needs 'video', expected a pipeline"):
        build(DiffusersConfig(path=str(tmp_path / "wan")), device="cpu")


@pytest.mark.parametrize(
    ("name", "images", "expected"),
    [
        ("WanPipeline", 1, r"got 1 images for prompt 'a ring'; WanPipeline takes 0\."),
        ("QwenImageEditPipeline", 0, r"got 0 images for prompt 'a ring'; QwenImageEditPipeline takes 1\."),
        ("FluxKontextPipeline", 2, r"got 2 images for prompt 'a ring'; FluxKontextPipeline takes 0 to 1\."),
        ("QwenImageEditPlusPipeline", 9, r"got 9 images for prompt 'a ring'; QwenImageEditPlusPipeline takes 1 to 8\."),
    ],
)
def test_a_prompt_with_too_few_or_too_many_images_is_refused(
    load: Callable[..., DiffusersModel], name: str, images: int, expected: str
) -> None:
    media = tuple(LoadedImage.of(torch.zeros(3, 64, 64), role="source") for _ in range(images))
    inputs = Inputs(ids=("a",), prompts=("a ring",), texts=("a ring",), media=(media,))
    with pytest.raises(DataError, match=rf"^media: {expected} Change the prompt file"):
        load(name).encode(inputs, sampling=SAMPLING)


def test_prompts_with_and_without_images_are_not_mixed(load: Callable[..., DiffusersModel]) -> None:
    image = LoadedImage.of(torch.zeros(3, 64, 64), role="source")
    inputs = Inputs(ids=("a", "b"), prompts=("a", "b"), texts=("a", "b"), media=((image,), ()))
    with pytest.raises(DataError, match=r"^media: prompt 'b' has no image, and others have"):
        load("FluxKontextPipeline").encode(inputs, sampling=SAMPLING)


def test_an_image_that_is_encoded_by_a_draw_is_the_same_each_time(load: Callable[..., DiffusersModel]) -> None:
    """HunyuanVideo SkyReels samples the posterior of its VAE. Neither the global generator nor the other rows count."""
    model, sampling = load("HunyuanSkyreelsImageToVideoPipeline"), dataclasses.replace(SAMPLING, frames=5)
    texts, media = ("a ring", "a disc"), []
    for level in (0.2, 0.8):
        media.append((LoadedImage.of(torch.full((3, 64, 64), level), role="source"),))
    inputs = Inputs(ids=texts, prompts=texts, texts=texts, media=tuple(media))
    both = model.encode(inputs, sampling=sampling)
    torch.manual_seed(1)
    alone = model.encode(inputs.select([1]), sampling=sampling)
    assert any(name.startswith("prepare_latents") for name in both)
    for name, value in alone.items():
        assert torch.equal(torch.as_tensor(value[0]), torch.as_tensor(both[name][1])), name


def test_guidance_of_a_model_that_reads_its_scale_is_refused(load: Callable[..., DiffusersModel]) -> None:
    sampling = dataclasses.replace(SAMPLING, guidance_scale=4.5)
    with pytest.raises(RecipeError, match=r"^sampling\.guidance_scale: got 4\.5, but FluxPipeline is distilled"):
        load("FluxPipeline").encode(Inputs.of_texts(["a ring"]), sampling=sampling)


def test_a_model_whose_velocity_is_off_is_refused_with_the_number(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state dependent transformer: every second call is another one."""
    from diffusers import FluxTransformer2DModel  # pyright: ignore[reportPrivateImportUsage]

    own, calls = FluxTransformer2DModel.forward, [0]

    def drifting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return (own(self, *args, **kwargs)[0] * (1 + 0.01 * calls[0]),)

    monkeypatch.setattr(FluxTransformer2DModel, "forward", drifting)
    with pytest.raises(
        RecipeError, match=r"three steps of its own run and its velocities differ by 0\.0\d+ of the lar"
    ):
        build(DiffusersConfig(path=str(tiny_folder)), device="cpu")


def test_a_model_that_does_not_hear_the_prompt_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    from diffusers import FluxTransformer2DModel  # pyright: ignore[reportPrivateImportUsage]

    folder = tmp_path / "deaf"
    shutil.copytree(tiny_folder, folder)
    transformer = FluxTransformer2DModel.from_pretrained(folder / "transformer")
    with torch.no_grad():
        for name in ("context_embedder", "time_text_embed.text_embedder.linear_1"):
            transformer.get_submodule(name).get_parameter("weight").zero_()
    transformer.save_pretrained(folder / "transformer")
    with pytest.raises(RecipeError, match=r"its velocity does not depend on the prompt"):
        build(DiffusersConfig(path=str(folder)), device="cpu")


def test_a_timestep_of_rows_is_expanded_and_mapped_row_by_row_and_nothing_else() -> None:
    rows = torch.tensor([100.0, 200.0, 300.0])
    t = RowTimestep.of(rows)
    assert torch.equal((1000 - t.expand(3)) / 1000, (1000 - rows) / 1000)
    assert torch.equal(((1 - t / 1000)[None].repeat(6)).reshape(2, 3), (1 - rows / 1000).expand(2, 3))
    assert torch.equal(t.to(torch.float64).expand(3), rows.double())
    for mixes in (float, lambda one: one.item(), lambda one: one.expand(2), lambda one: one * torch.ones(3)):
        with pytest.raises(TypeError):
            mixes(t)


def test_a_pipeline_that_keeps_a_state_from_step_to_step_is_refused_with_the_switch(
    folder: Callable[[str], Path],
) -> None:
    path = str(folder("QwenImage21Pipeline"))
    message = r"called with kv_cache_mode='extract' in some steps and 'cached' in others: it keeps a state from step to"
    with pytest.raises(RecipeError, match=rf"^model\.path: QwenImage21Pipeline cannot .* {message}"):
        build(DiffusersConfig(path=path, call={"use_kv_cache": True}), device="cpu")


def test_a_number_of_steps_that_a_checkpoint_does_not_have_is_refused(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    own = Path(shutil.copytree(folder("QwenImage21Pipeline"), tmp_path / "own"))
    change("model_index.json", sample_sigmas=[1.0, 0.7, 0.3])(own)
    model = build(DiffusersConfig(path=str(own)), device="cpu")
    with pytest.raises(RecipeError, match=r"^sampling\.num_inference_steps: got 4, but .* has a schedule of 3 steps\."):
        model.schedule(SAMPLING)
    assert len(model.schedule(dataclasses.replace(SAMPLING, num_inference_steps=3))) == 4


def test_a_blank_video_is_encoded_once_for_a_prompt_and_not_in_every_forward(
    load: Callable[..., DiffusersModel],
) -> None:
    model = load("WanVACEPipeline")
    sampling = dataclasses.replace(SAMPLING, frames=5)
    conditions = model.encode(Inputs.of_texts(["a ring"]), sampling=sampling)
    calls: list[Any] = []
    handle = model.vae.encoder.register_forward_pre_hook(lambda *args: calls.append(args))
    x = torch.randn((1, *model.latent_shape(sampling)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.velocity(x, torch.tensor([0.5]), conditions)
    handle.remove()
    assert not calls
