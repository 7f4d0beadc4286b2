from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import as_hub_id, cut
from safetensors.torch import load_file, save_file
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig, ScheduleConfig
from unirl.models.sd3 import tiny
from unirl.models.sd3.config import Sd3Config
from unirl.models.sd3.model import Sd3Model, build
from unirl.models.sd3.plugin import SPEC
from unirl.numerics.diffusion.rollout import encoded


@pytest.mark.parametrize("variant", ["exact", "diffusers-default"])
def test_a_hub_id_has_the_schedule_and_the_weights_of_the_local_path(
    tiny_folder: Path,
    tiny_model: Sd3Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sampling: LatentSamplingConfig,
    variant: str,
) -> None:
    hub_id = as_hub_id(tiny_folder, tmp_path, monkeypatch)
    fetched = build(Sd3Config(path=hub_id), device="cpu")
    asked = dataclasses.replace(sampling, schedule=ScheduleConfig(variant=variant))
    assert torch.equal(fetched.schedule(asked), tiny_model.schedule(asked))
    assert float(fetched.schedule(asked)[1]) != 0.75  # a shift of 3, not the unshifted grid
    for name, weight in tiny_model.trainable.state_dict().items():
        assert torch.equal(weight, fetched.trainable.state_dict()[name])


def test_a_hub_id_that_is_not_there_is_one_clear_error(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_hub_id(tiny_folder, tmp_path, monkeypatch)
    with pytest.raises(RecipeError, match=r"^model\.path: there is no folder 'acme/other'.*hub"):
        build(Sd3Config(path="acme/other"), device="cpu")


def test_a_shift_of_the_recipe_replaces_the_checkpoints(tiny_model: Sd3Model, sampling: LatentSamplingConfig) -> None:
    result = tiny_model.schedule(dataclasses.replace(sampling, schedule=ScheduleConfig(shift=1.0)))
    assert result.tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    with pytest.raises(RecipeError, match=r"sampling\.schedule.*'exakt'"):
        tiny_model.schedule(dataclasses.replace(sampling, schedule=ScheduleConfig(variant="exakt")))


def test_equal_prompts_are_encoded_once(tiny_model: Sd3Model, sampling: LatentSamplingConfig) -> None:
    rows: list[int] = []
    encoder = tiny_model.pipeline.text_encoder
    handle = encoder.register_forward_pre_hook(lambda _module, args: rows.append(args[0].shape[0]))
    inputs = Inputs.of_texts(["a ring", "a disc", "a ring", "a ring"])
    result = encoded(tiny_model, inputs, sampling=sampling).expanded()
    handle.remove()
    assert rows == [2]
    assert torch.equal(result["prompt_embeds"][0], result["prompt_embeds"][3])
    assert not torch.equal(result["prompt_embeds"][0], result["prompt_embeds"][1])


def test_encoders_and_vae_are_frozen_and_the_transformer_is_not(tiny_model: Sd3Model) -> None:
    parts = {n: p for n, p in tiny_model.pipeline.components.items() if isinstance(p, torch.nn.Module)}
    free = {n for n, part in parts.items() if any(p.requires_grad for p in part.parameters())}
    assert free == {"transformer"}
    assert not any(part.training for part in parts.values())
    assert tiny_model.trainable is tiny_model.transformer


def test_the_velocity_has_a_gradient_and_is_fp32_in_every_dtype(
    tiny_folder: Path, tiny_model: Sd3Model, sampling: LatentSamplingConfig
) -> None:
    x = torch.randn(2, *tiny_model.latent_shape(sampling), generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.9, 0.3])
    conditions = tiny_model.encode(Inputs.of_texts(["a ring", "a disc"]), sampling=sampling)
    exact = tiny_model.velocity(x, sigma, conditions)
    assert exact.dtype is torch.float32
    assert exact.requires_grad
    for config in (
        Sd3Config(path=str(tiny_folder), dtype="bfloat16"),
        Sd3Config(path=str(tiny_folder), autocast="bfloat16"),
    ):
        rounded = build(config, device="cpu")
        result = rounded.velocity(x, sigma, conditions)
        assert result.dtype is torch.float32
        # bf16 keeps 8 bits; two blocks of it stay within a few of them.
        error = ((result - exact).abs().max() / exact.abs().max()).detach()
        assert 1e-5 < float(error) < 0.05
        result.sum().backward()
        weight = next(rounded.trainable.parameters())
        assert weight.dtype is (torch.bfloat16 if config.autocast is None else torch.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_timestep_stays_fp32(tiny_folder: Path, sampling: LatentSamplingConfig, dtype: str) -> None:
    model = build(Sd3Config(path=str(tiny_folder), dtype=dtype), device="cpu")
    seen: list[Tensor] = []
    model.transformer.time_text_embed.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    sigma = torch.tensor([0.964286])
    x = torch.randn(1, *model.latent_shape(sampling))
    with torch.no_grad():
        model.velocity(x, sigma, model.encode(Inputs.of_texts(["a ring"]), sampling=sampling))
    # In bf16 964.286 would be 964.
    assert seen[0].tolist() == (sigma * 1000).tolist()


def test_a_wrapper_that_rounds_the_timestep_is_refused(tiny_folder: Path, sampling: LatentSamplingConfig) -> None:
    model = build(Sd3Config(path=str(tiny_folder), dtype="bfloat16"), device="cpu")

    def cast_inputs(_module: torch.nn.Module, args: tuple[()], kwargs: dict[str, Tensor]) -> object:
        return args, {**kwargs, "timestep": kwargs["timestep"].bfloat16()}

    model.trainable.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    conditions = model.encode(Inputs.of_texts(["a ring"]), sampling=sampling)
    with pytest.raises(RuntimeError, match=r"timestep reached the transformer as torch\.bfloat16"):
        model.velocity(torch.zeros(1, *model.latent_shape(sampling)), torch.ones(1), conditions)


def test_decoding_in_chunks_gives_the_same_images(tiny_folder: Path) -> None:
    latents = torch.randn(5, 16, 4, 4, generator=torch.Generator().manual_seed(0))
    images = {}
    for batch in (0, 2):
        model = build(Sd3Config(path=str(tiny_folder), decode_batch=batch), device="cpu")
        with torch.no_grad():
            images[batch] = model.decode(latents)
    assert images[0].shape == (5, 3, 32, 32)
    assert images[0].dtype is torch.float32
    assert 0 <= float(images[0].min()) <= float(images[0].max()) <= 1
    # Another batch, another order of sums in the convolutions.
    torch.testing.assert_close(images[0], images[2], rtol=0, atol=1e-5)


def test_the_gradient_of_a_decoding_in_chunks_keeps_one_chunk(tiny_folder: Path) -> None:
    gradients, kept = {}, {}
    for batch in (0, 1):
        model = build(Sd3Config(path=str(tiny_folder), decode_batch=batch), device="cpu")
        latents = torch.randn(4, 16, 4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, to=sizes: to.append(x.nbytes) or x, lambda x: x):
            images = model.decode(latents)
        (gradients[batch],) = torch.autograd.grad(images.square().sum(), latents)
        kept[batch] = sum(sizes)
    # Another batch, another order of sums in the convolutions.
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4 * float(gradients[0].abs().max()))
    # Latents and what joins and scales the images are kept, and no activation of the VAE.
    assert kept[1] < kept[0] / 4


def test_an_image_has_a_gradient_to_its_latent(tiny_model: Sd3Model) -> None:
    latents = torch.zeros(1, 16, 4, 4, requires_grad=True)
    tiny_model.decode(latents).sum().backward()
    assert latents.grad is not None
    assert float(latents.grad.abs().sum()) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"height": 70}, r"sampling\.height: got 70, .* multiple of 16 .* Nearest: 64 or 80\."),
        ({"width": 8}, r"sampling\.width: got 8, .* Nearest: 16\."),
        ({"width": 2048}, r"sampling\.width: got 2048, .* from 16 to 1024\. Nearest: 1024\."),
        ({"frames": 5}, r"sampling\.frames: got 5, expected 1: .* single images"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_one_that_does(
    tiny_model: Sd3Model, sampling: LatentSamplingConfig, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        tiny_model.latent_shape(dataclasses.replace(sampling, **changes))


def test_a_latent_is_an_eighth_of_the_image(tiny_model: Sd3Model, sampling: LatentSamplingConfig) -> None:
    assert tiny_model.latent_shape(dataclasses.replace(sampling, height=32, width=96)) == (16, 4, 12)


def test_long_sequences_are_refused(tiny_model: Sd3Model, sampling: LatentSamplingConfig) -> None:
    with pytest.raises(RecipeError, match=r"sampling\.max_sequence_length: got 600; .* 1 to 512"):
        tiny_model.encode(Inputs.of_texts(["a ring"]), sampling=dataclasses.replace(sampling, max_sequence_length=600))


def pickled(folder: Path) -> None:
    """Turn the weights of a component into a pickle, as `torch.save` writes it."""
    (file,) = folder.glob("*.safetensors")
    torch.save(load_file(file), file.with_name(file.name.replace("model.safetensors", "pytorch_model.bin")))
    if file.name.startswith("diffusion"):
        torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()


def without_a_weight(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    del weights["pos_embed.proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shutil.rmtree(folder), r"there is no folder .* not a hub id either"),
        (lambda folder: (folder / "model_index.json").unlink(), r"has no model_index\.json"),
        (lambda folder: (folder / "model_index.json").write_text("{"), r"cannot be read as JSON"),
        (lambda folder: shutil.rmtree(folder / "vae"), r"lacks vae/.*Fetch the whole checkpoint\."),
        (
            lambda folder: shutil.rmtree(folder / "text_encoder_3"),
            r"lacks text_encoder_3/.*or set model\.use_t5=false",
        ),
        (
            lambda folder: (folder / "scheduler" / "scheduler_config.json").unlink(),
            r"scheduler_config\.json' cannot be read",
        ),
        (lambda folder: cut(folder / "transformer"), r"a component does not load"),
        (lambda folder: cut(folder / "text_encoder_2"), r"a component does not load"),
        (
            lambda folder: (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink(),
            r"a component does not load",
        ),
        (lambda folder: (folder / "tokenizer" / "tokenizer.json").unlink(), r"has no vocabulary in tokenizer/"),
        (lambda folder: pickled(folder / "transformer"), r"a component does not load"),
        (lambda folder: pickled(folder / "text_encoder"), r"a component does not load"),
        (lambda folder: without_a_weight(folder / "transformer"), r"transformer' lack 'pos_embed\.proj\.weight'\."),
    ],
    ids=[
        "absent",
        "no-index",
        "bad-index",
        "no-vae",
        "no-t5",
        "no-scheduler",
        "cut",
        "cut-text",
        "no-weights",
        "no-tokens",
        "pickled",
        "pickled-text",
        "a-weight-less",
    ],
)
def test_a_damaged_checkpoint_is_one_clear_error(tmp_path: Path, tiny_folder: Path, damage, message) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_folder, folder)
    damage(folder)
    with pytest.raises(RecipeError, match=message) as caught:
        build(Sd3Config(path=str(folder)), device="cpu")
    assert str(caught.value).startswith("model.path: ")


def test_another_pipelines_checkpoint_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    folder = tmp_path / "flux"
    shutil.copytree(tiny_folder, folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": "FluxPipeline"}))
    with pytest.raises(RecipeError, match=r"checkpoint of 'FluxPipeline'; sd3 loads 'StableDiffusion3Pipeline'"):
        build(Sd3Config(path=str(folder)), device="cpu")


def test_settings_out_of_range_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"model\.dtype: got 'fp16'.*float32, bfloat16, float16"):
        build(Sd3Config(path=str(tiny_folder), dtype="fp16"), device="cpu")
    with pytest.raises(RecipeError, match=r"model\.decode_batch: got -1"):
        build(Sd3Config(path=str(tiny_folder), decode_batch=-1), device="cpu")


def test_the_miniature_is_the_same_bytes_for_the_same_seed(tmp_path: Path, tiny_folder: Path) -> None:
    state = torch.get_rng_state()
    tiny.write(tmp_path / "same", seed=0)
    tiny.write(tmp_path / "other", seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    files = sorted(path.relative_to(tiny_folder) for path in tiny_folder.rglob("*") if path.is_file())
    assert files == sorted(p.relative_to(tmp_path / "same") for p in (tmp_path / "same").rglob("*") if p.is_file())
    for file in files:
        same = (tmp_path / "same" / file).read_bytes() == (tiny_folder / file).read_bytes()
        assert same, file
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert (tmp_path / "other" / weights).read_bytes() != (tiny_folder / weights).read_bytes()
    assert sum(file.stat().st_size for file in tiny_folder.rglob("*") if file.is_file()) < 4_000_000


def test_every_lora_target_and_block_of_the_spec_exists(tiny_model: Sd3Model) -> None:
    names = [name for name, module in tiny_model.trainable.named_modules() if isinstance(module, torch.nn.Linear)]
    for target in SPEC.lora_targets:
        assert any(name.endswith(f".{target}") for name in names), target
    classes = {type(module).__name__ for module in tiny_model.trainable.modules()}
    assert set(SPEC.wrap_blocks) <= classes
    assert getattr(tiny_model, SPEC.trainable) is tiny_model.trainable
