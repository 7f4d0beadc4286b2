from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import as_hub_id, cut
from unirl.core.errors import RecipeError
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig, ScheduleConfig
from unirl.models.qwen_image.config import QwenImageConfig
from unirl.models.qwen_image.model import QwenImageModel, build
from unirl.models.qwen_image.plugin import SPEC
from unirl.numerics.diffusion.rollout import encoded


def test_a_hub_id_has_the_schedule_and_the_weights_of_the_local_path(
    tiny_folder: Path,
    model: QwenImageModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sampling: LatentSamplingConfig,
) -> None:
    hub_id = as_hub_id(tiny_folder, tmp_path, monkeypatch)
    fetched = build(QwenImageConfig(path=hub_id), device="cpu")
    assert torch.equal(fetched.schedule(sampling), model.schedule(sampling))
    state = fetched.trainable.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in model.trainable.state_dict().items())
    with pytest.raises(RecipeError, match=r"^model\.path: there is no folder 'acme/other'.*hub"):
        build(QwenImageConfig(path="acme/other"), device="cpu")


def test_equal_prompts_are_encoded_once_and_without_the_head_of_the_language_model(
    model: QwenImageModel, sampling: LatentSamplingConfig
) -> None:
    rows: list[int] = []
    encoder = model.pipeline.text_encoder
    handles = [
        encoder.model.language_model.embed_tokens.register_forward_pre_hook(lambda _m, args: rows.append(len(args[0]))),
        encoder.lm_head.register_forward_pre_hook(lambda _m, _args: rows.append(-1)),
    ]
    inputs = Inputs.of_texts(["a ring", "a disc", "a ring", "a ring"])
    result = encoded(model, inputs, sampling=sampling).expanded()
    for handle in handles:
        handle.remove()
    assert rows == [2]
    assert torch.equal(result["prompt_embeds"][0], result["prompt_embeds"][3])
    assert not torch.equal(result["prompt_embeds"][0], result["prompt_embeds"][1])


def test_a_batch_is_cut_to_its_longest_prompt_and_masked_where_it_is_padded(
    model: QwenImageModel, sampling: LatentSamplingConfig
) -> None:
    given: list[tuple[int, torch.Tensor | None]] = []
    handle = model.transformer.register_forward_pre_hook(
        lambda _m, _args, kwargs: given.append(
            (kwargs["encoder_hidden_states"].shape[1], kwargs["encoder_hidden_states_mask"])
        ),
        with_kwargs=True,
    )
    x = torch.zeros(2, *model.latent_shape(sampling))
    with torch.no_grad():
        for prompts in (["a ring", "a disc"], ["a ring", "a"]):
            model.velocity(x, torch.ones(2), model.encode(Inputs.of_texts(prompts), sampling=sampling))
    handle.remove()
    # "a", " r", with which " relationships" begins, "i", "n", "g"; five more end the template.
    (length, no_mask), (same_length, mask) = given
    assert length == same_length == 10
    assert no_mask is None
    assert mask is not None
    assert mask.sum(dim=1).tolist() == [10, 6]


def test_encoder_and_vae_are_frozen_and_the_transformer_is_not(model: QwenImageModel) -> None:
    parts = {n: p for n, p in model.pipeline.components.items() if isinstance(p, torch.nn.Module)}
    assert {n for n, part in parts.items() if any(p.requires_grad for p in part.parameters())} == {"transformer"}
    assert not any(part.training for part in parts.values())
    assert getattr(model, SPEC.trainable) is model.trainable


def test_the_velocity_has_a_gradient_and_is_fp32_under_autocast(
    tiny_folder: Path, model: QwenImageModel, sampling: LatentSamplingConfig
) -> None:
    x = torch.randn(2, *model.latent_shape(sampling), generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.5, 0.25])  # which bf16 does not round, nor a thousand times that
    conditions = model.encode(Inputs.of_texts(["a ring", "a disc on the left"]), sampling=sampling)
    exact = model.velocity(x, sigma, conditions).detach()
    rounded = build(QwenImageConfig(path=str(tiny_folder), autocast="bfloat16"), device="cpu")
    result = rounded.velocity(x, sigma, conditions)
    assert result.dtype is torch.float32
    # bf16 keeps 8 bits; two blocks of it stay within a few of them.
    assert 1e-5 < float((result.detach() - exact).abs().max() / exact.abs().max()) < 0.05
    result.sum().backward()
    weight = next(rounded.trainable.parameters())
    assert weight.dtype is torch.float32
    assert weight.grad is not None


def test_decoding_in_chunks_gives_the_same_images(tiny_folder: Path, model: QwenImageModel) -> None:
    latents = torch.randn(3, 16, 2, 3, generator=torch.Generator().manual_seed(0))
    chunked = build(QwenImageConfig(path=str(tiny_folder), decode_batch=2), device="cpu")
    with torch.no_grad():
        images = model.decode(latents)
        # Another batch, another order of sums in the convolutions.
        torch.testing.assert_close(chunked.decode(latents), images, rtol=0, atol=1e-5)
    assert images.shape == (3, 3, 32, 48)
    assert images.dtype is torch.float32
    assert 0 <= float(images.min()) <= float(images.max()) <= 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"height": 70}, r"sampling\.height: got 70, .* multiple of 16\. Nearest: 64 or 80\."),
        ({"width": 8}, r"sampling\.width: got 8, .* Nearest: 16\."),
        ({"frames": 5}, r"sampling\.frames: got 5, expected 1: .* single images"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_one_that_does(
    model: QwenImageModel, sampling: LatentSamplingConfig, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        model.latent_shape(dataclasses.replace(sampling, **changes))


def test_what_the_model_cannot_honour_is_refused(
    tiny_folder: Path, model: QwenImageModel, sampling: LatentSamplingConfig
) -> None:
    with pytest.raises(RecipeError, match=r"sampling\.max_sequence_length: got 1025; .* 1 to 1024"):
        model.encode(Inputs.of_texts(["a ring"]), sampling=dataclasses.replace(sampling, max_sequence_length=1025))
    with pytest.raises(RecipeError, match=r"sampling\.schedule.*'exakt'"):
        model.schedule(dataclasses.replace(sampling, schedule=ScheduleConfig(variant="exakt")))
    with pytest.raises(RecipeError, match=r"model\.dtype: got 'fp16'.*float32, bfloat16, float16"):
        build(QwenImageConfig(path=str(tiny_folder), dtype="fp16"), device="cpu")
    with pytest.raises(RecipeError, match=r"model\.decode_batch: got -1"):
        build(QwenImageConfig(path=str(tiny_folder), decode_batch=-1), device="cpu")


def change(file: str, **values: object) -> Callable[[Path], None]:
    """Set keys of a JSON file of the checkpoint."""

    def done(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return done


def without_words(folder: Path) -> None:
    """A vocabulary of bytes alone, which makes more tokens of the template than the pipeline drops."""
    path = folder / "tokenizer" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"] = []
    path.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, r"there is no folder .* and it is not a hub id either"),
        (lambda folder: (folder / "model_index.json").unlink(), r"has no model_index\.json"),
        (change("model_index.json", _class_name="QwenImageEditPipeline"), r"of 'QwenImageEditPipeline'; qwen-image"),
        (lambda folder: shutil.rmtree(folder / "vae"), r"lacks vae/"),
        (lambda folder: (folder / "scheduler" / "scheduler_config.json").write_text("{"), r"cannot be read as JSON"),
        (lambda folder: (folder / "tokenizer" / "tokenizer.json").unlink(), r"has no vocabulary in tokenizer/"),
        (change("transformer/config.json", guidance_embeds=True), r"has a transformer with guidance_embeds = true"),
        (without_words, r"makes \d+ tokens of the text before the prompt, and QwenImagePipeline drops 34"),
        (lambda folder: cut(folder / "transformer"), r"a component does not load"),
    ],
    ids=["absent", "no-index", "edit", "no-vae", "bad-scheduler", "no-tokens", "distilled", "other-tokens", "cut"],
)
def test_a_checkpoint_that_does_not_fit_is_one_clear_error(
    tmp_path: Path, tiny_folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_folder, folder)
    damage(folder)
    with pytest.raises(RecipeError, match=message) as caught:
        build(QwenImageConfig(path=str(folder)), device="cpu")
    assert str(caught.value).startswith("model.path: ")


def test_the_layers_that_may_be_split_exist_in_every_block(model: QwenImageModel) -> None:
    linear = {name for name, module in model.trainable.named_modules() if isinstance(module, torch.nn.Linear)}
    for pattern in SPEC.tensor_parallel:
        assert {pattern.replace("*", block) for block in "01"} <= linear
