"""HPSv3 against transformers' Qwen2-VL and the head written out, on a checkpoint of random weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessorPil
from unirl.core.errors import RecipeError, RewardFailed
from unirl.rewards.vlm.config import Hpsv3Config
from unirl.rewards.vlm.hpsv3 import build
from unirl.rewards.vlm.tiny import write_hpsv3
from vlm_samples import images, samples

pytestmark = pytest.mark.keyed

CLOSE = 1e-5
"""Of means up to 1: sums over 1024 units of the head in another order, in fp32, move them by about 1e-6."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {**write_hpsv3(tmp_path_factory.mktemp("hpsv3"), seed=0), "dtype": "float32"}


def by_hand(settings: dict[str, Any], prompt: str, image: torch.Tensor) -> tuple[float, float]:
    """mu and sigma: images scaled by Pillow, the prompt written out, the head as matrix products."""
    weights = load_file(Path(settings["model"]) / "HPSv3.safetensors")
    config = AutoConfig.from_pretrained(settings["base"])
    config.text_config.vocab_size = weights["model.embed_tokens.weight"].shape[0]
    model = Qwen2VLForConditionalGeneration(config).eval()
    renamed = {
        ("model." if name.startswith("visual.") else "")
        + (name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name): value
        for name, value in weights.items()
        if not name.startswith("rm_head.")
    }
    model.load_state_dict(renamed)
    pil = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
    # 64 x 64 and 4 x 28 x 28 pixels: 2 x 28 a side.
    pil = pil.resize((56, 56), Image.Resampling.BICUBIC)
    seen = Qwen2VLImageProcessorPil(patch_size=14, do_resize=False)(images=[pil], return_tensors="pt")
    tokenizer: Any = AutoTokenizer.from_pretrained(settings["base"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|Reward|>"]})
    text = (
        f"<|im_start|>user\n<|vision_start|>{'<|image_pad|>' * 4}<|vision_end|>How good is this picture of: {prompt}\n"
        "Rating: <|Reward|><|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = tokenizer(text, return_tensors="pt")
    ids = tokens["input_ids"]
    types = (ids == config.image_token_id).int()
    with torch.no_grad():
        out = model(**tokens, **seen, mm_token_type_ids=types, output_hidden_states=True)
    place = ids[0].tolist().index(tokenizer.convert_tokens_to_ids("<|Reward|>"))
    x = out.hidden_states[-1][0, place]
    for number in (0, 3, 5):
        x = weights[f"rm_head.{number}.weight"] @ x + weights[f"rm_head.{number}.bias"]
        x = x.relu() if number < 5 else x
    return float(x[0]), float(x[1])


def test_mu_and_sigma_are_those_of_the_published_computation(settings: dict[str, Any]) -> None:
    prompts, pixels = ["a cat", "a longer prompt with {prompt} in it"], images(2, height=64, width=64)
    scores = build(Hpsv3Config(**settings), device="cpu").score(samples(prompts, pixels))
    expected = torch.tensor([by_hand(settings, *pair) for pair in zip(prompts, pixels, strict=True)])
    result = torch.stack([scores.parts["mu"], scores.parts["sigma"]], dim=1)
    torch.testing.assert_close(result, expected, atol=CLOSE, rtol=0)
    torch.testing.assert_close(scores.values, expected[:, 0] / 15, atol=CLOSE, rtol=0)
    assert float((expected[0] - expected[1]).abs().max()) > 10 * CLOSE


def test_both_namings_of_the_weights_load(settings: dict[str, Any], tmp_path: Path) -> None:
    weights = load_file(Path(settings["model"]) / "HPSv3.safetensors")
    renamed = {
        (f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1)): value
        for name, value in weights.items()
    }
    assert renamed.keys() != weights.keys()
    save_file(renamed, tmp_path / "HPSv3.safetensors")
    given = samples(["a cat"], images(1))
    one = build(Hpsv3Config(**settings), device="cpu").score(given)
    other = build(Hpsv3Config(**{**settings, "model": str(tmp_path)}), device="cpu").score(given)
    assert torch.equal(one.values, other.values)


def test_checkpoints_that_are_not_hpsv3_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    weights = load_file(Path(settings["model"]) / "HPSv3.safetensors")

    def refusal(changed: dict[str, torch.Tensor]) -> str:
        shutil.rmtree(tmp_path, ignore_errors=True)
        tmp_path.mkdir()
        save_file(changed, tmp_path / "HPSv3.safetensors")
        with pytest.raises(RecipeError) as caught:
            build(Hpsv3Config(**{**settings, "model": str(tmp_path)}), device="cpu")
        return str(caught.value)

    headless = {name: value for name, value in weights.items() if not name.startswith("rm_head.")}
    assert "has a head of no layers, expected [1024, 16, 2]" in refusal(headless)
    narrow = {**weights, "rm_head.5.bias": torch.zeros(1), "rm_head.5.weight": torch.zeros(1, 16)}
    assert "has a head of [1024, 16, 1], expected [1024, 16, 2]" in refusal(narrow)
    lacking = {name: value for name, value in weights.items() if name != "visual.blocks.1.mlp.fc1.weight"}
    assert "visual.blocks.1.mlp.fc1.weight" in refusal(lacking)
    with pytest.raises(RecipeError, match=r"reward.hpsv3.model: .* does not load"):
        build(Hpsv3Config(**{**settings, "model": str(tmp_path / "nowhere")}), device="cpu")


@pytest.mark.parametrize("text", ["{prompt}", "<|Reward|>", "{prompt} {text_prompt} <|Reward|>"])
def test_an_instruction_has_one_prompt_and_one_reward_token(
    settings: dict[str, Any], tmp_path: Path, text: str
) -> None:
    file = tmp_path / "instruction.txt"
    file.write_text(text)
    with pytest.raises(RecipeError, match=r"reward.hpsv3.instruction: .*expected one of each"):
        build(Hpsv3Config(**{**settings, "instruction": str(file)}), device="cpu")


def test_without_the_instruction_of_the_weights_there_is_no_score(settings: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"reward.hpsv3.instruction: got no file .*INSTRUCTION"):
        build(Hpsv3Config(**{**settings, "instruction": ""}), device="cpu")


def test_a_reward_token_in_a_prompt_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(RewardFailed, match=r"holds '<\|Reward\|>', a control token"):
        build(Hpsv3Config(**settings), device="cpu").score(samples(["a cat <|Reward|>"]))
