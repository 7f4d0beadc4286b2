"""HPSv3 and EditReward against transformers' model classes and the heads written out, on random weights."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)
from unirl.core.errors import RecipeError, RewardFailed
from unirl.rewards.vlm.config import EditRewardConfig, Hpsv3Config
from unirl.rewards.vlm.preference import build_edit_reward, build_hpsv3
from unirl.rewards.vlm.tiny import write_edit_reward, write_hpsv3
from vlm_samples import images, samples

CLOSE = 1e-5
"""Tolerance of means up to 1: sums over 1024 units of the head in another order, in fp32, move them by about 1e-6."""


@pytest.fixture(scope="module")
def hpsv3(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {**write_hpsv3(tmp_path_factory.mktemp("hpsv3"), seed=0), "dtype": "float32"}


@pytest.fixture(scope="module")
def edit(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {**write_edit_reward(tmp_path_factory.mktemp("edit"), seed=0), "dtype": "float32"}


class Plain:
    """A checkpoint by transformers' model class, with names, prompt, positions and heads written out by hand."""

    def __init__(self, settings: dict[str, Any], *, file: str, cls: Any) -> None:
        self.weights = load_file(Path(settings["model"]) / file)
        self.config = AutoConfig.from_pretrained(settings["base"])
        embeddings = next(value for name, value in self.weights.items() if "embed_tokens" in name)
        self.config.text_config.vocab_size = embeddings.shape[0]
        self.model = cls(self.config).eval()
        renamed = {
            ("model." if name.startswith("visual.") else "")
            + (
                name
                if "model.language_model" in name or "model.visual" in name
                else name.replace("model.", "model.language_model.", 1)
            ): value
            for name, value in self.weights.items()
            if not name.startswith("rm_head")
        }
        self.model.load_state_dict(renamed)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(settings["base"])
        self.tokenizer.add_special_tokens({"additional_special_tokens": ["<|Reward|>"]})

    def head(self, prefix: str, text: str, shown: list[torch.Tensor]) -> list[float]:
        """Mean and sigma: images scaled by Pillow, the prompt written out, the head as matrix products."""
        # 64 x 64 and 4 x 28 x 28 pixels: 2 x 28 a side.
        pil = [
            Image.fromarray((one * 255).round().byte().permute(1, 2, 0).numpy()).resize(
                (56, 56), Image.Resampling.BICUBIC
            )
            for one in shown
        ]
        seen = Qwen2VLImageProcessorPil(patch_size=14, do_resize=False)(images=pil, return_tensors="pt")
        places = f"<|vision_start|>{'<|image_pad|>' * 4}<|vision_end|>" * len(shown)
        whole = f"<|im_start|>user\n{places}{text}\nRating: <|Reward|><|im_end|>\n<|im_start|>assistant\n"
        tokens = self.tokenizer(whole, return_tensors="pt")
        ids = tokens["input_ids"]
        # The published forwards give the decoder one position a token: without ids it cannot find the images.
        positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
        with torch.no_grad():
            out = self.model(**tokens, **seen, position_ids=positions, output_hidden_states=True)
        x = out.hidden_states[-1][0, ids[0].tolist().index(self.tokenizer.convert_tokens_to_ids("<|Reward|>"))]
        for number in (0, 3, 5):
            x = self.weights[f"{prefix}.{number}.weight"] @ x + self.weights[f"{prefix}.{number}.bias"]
            x = x.relu() if number < 5 else x
        return x.tolist()


def test_mu_and_sigma_of_hpsv3_are_those_of_the_published_computation(hpsv3: dict[str, Any]) -> None:
    prompts, pixels = ["a cat", "a longer prompt with {prompt} in it"], images(2, height=64, width=64)
    scores = build_hpsv3(Hpsv3Config(**hpsv3), device="cpu").score(samples(prompts, pixels))
    plain = Plain(hpsv3, file="HPSv3.safetensors", cls=Qwen2VLForConditionalGeneration)
    expected = torch.tensor(
        [
            plain.head("rm_head", f"How good is this instruction: {prompt}", [image])
            for prompt, image in zip(prompts, pixels, strict=True)
        ]
    )
    result = torch.stack([scores.parts["mu"], scores.parts["sigma"]], dim=1)
    torch.testing.assert_close(result, expected, atol=CLOSE, rtol=0)
    torch.testing.assert_close(scores.values, expected[:, 0] / 15, atol=CLOSE, rtol=0)
    assert float((expected[0] - expected[1]).abs().max()) > 10 * CLOSE


def png(folder: Path, name: str, pixels: torch.Tensor) -> Path:
    Image.fromarray((pixels * 255).round().byte().permute(1, 2, 0).numpy()).save(folder / name)
    return folder / name


def test_an_edit_gets_the_mean_of_both_heads_each_under_its_own_instruction(
    edit: dict[str, Any], tmp_path: Path
) -> None:
    prompts, pixels = ["make it blue", "x"], images(4, height=64, width=64)
    sources = [png(tmp_path, f"{row}.png", pixels[row]) for row in (0, 1)]
    reward = build_edit_reward(EditRewardConfig(**edit), device="cpu")
    scores = reward.score(samples(prompts, pixels[2:], sources=sources))
    plain = Plain(edit, file="model.safetensors", cls=Qwen2_5_VLForConditionalGeneration)
    following, quality = (
        torch.tensor(
            [
                plain.head(head, f"How good is this {name}_instruction: {prompt}", [pixels[row], pixels[row + 2]])
                for row, prompt in enumerate(prompts)
            ]
        )
        for head, name in (("rm_heads.head_0", "following"), ("rm_heads.head_1", "quality"))
    )
    expected = {"following": following[:, 0], "quality": quality[:, 0]}
    expected |= {"following_sigma": following[:, 1], "quality_sigma": quality[:, 1]}
    for name, values in expected.items():
        torch.testing.assert_close(scores.parts[name], values, atol=CLOSE, rtol=0)
    torch.testing.assert_close(scores.values, (following[:, 0] + quality[:, 0]) / 2, atol=CLOSE, rtol=0)
    swapped = plain.head("rm_heads.head_0", "How good is this following_instruction: x", [pixels[3], pixels[1]])
    assert abs(swapped[0] - float(following[1, 0])) > 10 * CLOSE


def test_an_edit_has_one_source(edit: dict[str, Any], tmp_path: Path) -> None:
    reward = build_edit_reward(EditRewardConfig(**edit), device="cpu")
    given = samples(["make it blue"], sources=[png(tmp_path, "source.png", images(1)[0])])
    twice = replace(given.inputs, media=(given.inputs.media[0] * 2,))
    with pytest.raises(RewardFailed, match=r"sample 's0' \(prompt 'make it blue'\) has 2 source images, expected one"):
        reward.score(replace(given, inputs=twice))
    with pytest.raises(RewardFailed, match="has no source image"):
        reward.score(samples(["make it blue"]))


def test_both_namings_of_the_weights_load(hpsv3: dict[str, Any], tmp_path: Path) -> None:
    weights = load_file(Path(hpsv3["model"]) / "HPSv3.safetensors")
    renamed = {
        (f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1)): value
        for name, value in weights.items()
    }
    assert renamed.keys() != weights.keys()
    save_file(renamed, tmp_path / "HPSv3.safetensors")
    given = samples(["a cat"], images(1))
    one = build_hpsv3(Hpsv3Config(**hpsv3), device="cpu").score(given)
    other = build_hpsv3(Hpsv3Config(**{**hpsv3, "model": str(tmp_path)}), device="cpu").score(given)
    assert torch.equal(one.values, other.values)


def test_checkpoints_of_something_else_are_refused(hpsv3: dict[str, Any], edit: dict[str, Any], tmp_path: Path) -> None:
    weights = load_file(Path(hpsv3["model"]) / "HPSv3.safetensors")

    def refusal(changed: dict[str, torch.Tensor]) -> str:
        shutil.rmtree(tmp_path, ignore_errors=True)
        tmp_path.mkdir()
        save_file(changed, tmp_path / "HPSv3.safetensors")
        with pytest.raises(RecipeError) as caught:
            build_hpsv3(Hpsv3Config(**{**hpsv3, "model": str(tmp_path)}), device="cpu")
        return str(caught.value)

    headless = {name: value for name, value in weights.items() if not name.startswith("rm_head.")}
    assert "has a head of no layers, expected [1024, 16, 2] under rm_head" in refusal(headless)
    narrow = {**weights, "rm_head.5.bias": torch.zeros(1), "rm_head.5.weight": torch.zeros(1, 16)}
    assert "has a head of [1024, 16, 1], expected [1024, 16, 2]" in refusal(narrow)
    lacking = {name: value for name, value in weights.items() if name != "visual.blocks.1.mlp.fc1.weight"}
    assert "visual.blocks.1.mlp.fc1.weight" in refusal(lacking)
    with pytest.raises(RecipeError, match=r"reward.hpsv3.model: .* does not load"):
        build_hpsv3(Hpsv3Config(**{**hpsv3, "model": str(tmp_path / "nowhere")}), device="cpu")
    with pytest.raises(RecipeError, match=r"reward.hpsv3.base: .* does not load with the weights of"):
        build_hpsv3(Hpsv3Config(**{**hpsv3, "base": edit["base"]}), device="cpu")


def test_pickled_weights_are_not_loaded(edit: dict[str, Any], tmp_path: Path) -> None:
    torch.save({}, tmp_path / "model.pth")
    with pytest.raises(RecipeError, match=r"reward.edit-reward.model: .*model\.safetensors.*\(\.pth\) are not loaded"):
        build_edit_reward(EditRewardConfig(**{**edit, "model": str(tmp_path)}), device="cpu")


@pytest.mark.parametrize("text", ["{prompt}", "<|Reward|>", "{prompt} {text_prompt} <|Reward|>"])
def test_an_instruction_has_one_prompt_and_one_reward_token(hpsv3: dict[str, Any], tmp_path: Path, text: str) -> None:
    file = tmp_path / "instruction.txt"
    file.write_text(text)
    with pytest.raises(RecipeError, match=r"reward.hpsv3.instruction: .*expected one of each"):
        build_hpsv3(Hpsv3Config(**{**hpsv3, "instruction": str(file)}), device="cpu")


def test_without_the_instructions_of_the_weights_there_is_no_score(hpsv3: dict[str, Any], edit: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"reward.hpsv3.instruction: got no file .*INSTRUCTION"):
        build_hpsv3(Hpsv3Config(**{**hpsv3, "instruction": ""}), device="cpu")
    with pytest.raises(RecipeError, match=r"reward.edit-reward.quality_instruction: got no file .*_EDIT_QUALITY"):
        build_edit_reward(EditRewardConfig(**{**edit, "quality_instruction": ""}), device="cpu")


def test_a_reward_token_in_a_prompt_is_refused(hpsv3: dict[str, Any]) -> None:
    with pytest.raises(RewardFailed, match=r"holds '<\|Reward\|>', a control token"):
        build_hpsv3(Hpsv3Config(**hpsv3), device="cpu").score(samples(["a cat <|Reward|>"]))
