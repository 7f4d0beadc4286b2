"""VideoAlign against transformers' Qwen2-VL in PEFT's LoRA, with patches, prompt and head written out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from unirl.core.errors import RecipeError, RewardFailed
from unirl.core.limits import Reason
from unirl.core.roles import ScoreInput
from unirl.rewards.video.config import VideoAlignConfig
from unirl.rewards.video.tiny import write_videoalign
from unirl.rewards.video.videoalign import VideoAlignReward, build, frame_size, sampled

Samples = Callable[..., ScoreInput]
Clip = Callable[..., Tensor]
CLOSE = {"rtol": 0, "atol": 2e-5}
"""Tolerance of raw scores near 1: fp32 through two layers, LoRA in the weights on one side, in outputs on the other."""
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {**write_videoalign(tmp_path_factory.mktemp("videoalign"), seed=0), "dtype": "float32"}


@pytest.fixture(scope="module")
def reward(settings: dict[str, Any]) -> VideoAlignReward:
    return build(VideoAlignConfig(**settings), device="cpu")


@pytest.fixture
def fresh(tmp_path: Path) -> dict[str, Any]:
    """Settings of a checkpoint that the test may damage."""
    return {**write_videoalign(tmp_path, seed=0), "dtype": "float32"}


def published(settings: Mapping[str, Any]) -> tuple[Any, Any]:
    """The PEFT model with the weights of model.pth, and the tokenizer with the reward tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(settings["base"])
    for token in ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"):
        tokenizer.add_tokens([token], special_tokens=True)
    config = AutoConfig.from_pretrained(settings["base"])
    config.text_config.vocab_size = len(tokenizer)
    model: Any = Qwen2VLForConditionalGeneration(config)
    model.rm_head = torch.nn.Linear(32, 1, bias=False)
    wrapped = get_peft_model(
        model, LoraConfig(r=2, lora_alpha=4, target_modules=r".*language_model.*_proj", exclude_modules=["rm_head"])
    )
    state = torch.load(Path(settings["model"]) / "checkpoint-10" / "model.pth", weights_only=True)
    start = "base_model.model."
    new = {
        f"{start}model.{name.removeprefix(start)}"
        if ".visual." in name
        else name.replace(f"{start}model.", f"{start}model.language_model."): value
        for name, value in state.items()
    }
    wrapped.load_state_dict(new)
    return wrapped.eval(), tokenizer


def by_hand(settings: Mapping[str, Any], prompt: str, frames: Tensor, places: list[int]) -> Tensor:
    """[3] raw scores. frames: 56 x 56, which needs no scaling."""
    wrapped, tokenizer = published(settings)
    pixels = (frames[places] - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    rows: list[Tensor] = []
    for time in range(0, len(places), 2):
        for block_y in range(0, 56, 28):
            for block_x in range(0, 56, 28):
                for y in (block_y, block_y + 14):
                    for x in (block_x, block_x + 14):
                        rows.append(pixels[time : time + 2, :, y : y + 14, x : x + 14].transpose(0, 1).flatten())
    count = len(rows) // 4
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n<|vision_start|>{'<|video_pad|>' * count}<|vision_end|>"
        f"\nLooks: <|VQ_reward|>\nMoves: <|MQ_reward|>\nAsked for: {prompt}\nShows it: <|TA_reward|>\n"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        hidden = wrapped.base_model.model.model(
            input_ids=ids,
            position_ids=torch.stack([torch.arange(ids.shape[1])[None]] * 3),
            pixel_values_videos=torch.stack(rows),
            video_grid_thw=torch.tensor([[len(places) // 2, 4, 4]]),
        ).last_hidden_state
        outputs = wrapped.base_model.model.rm_head(hidden)[0, :, 0]
    tokens = ids[0].tolist()
    return torch.stack(
        [outputs[tokens.index(tokenizer.convert_tokens_to_ids(f"<|{name}_reward|>"))] for name in ("VQ", "MQ", "TA")]
    )


def test_scores_are_those_of_the_published_computation(
    settings: dict[str, Any], reward: VideoAlignReward, samples: Samples, noise: Clip
) -> None:
    prompts = ["a cat", "a longer prompt with {text_prompt} in it"]
    videos = [noise(5, 3, 56, 56), noise(24, 3, 56, 56, seed=1)]
    scores = reward.score(samples(videos, prompts=prompts))
    # 5 frames at 8 a second are two thirds of a second: 4 at least. 24 are 3 s, 6 frames at 2 a second.
    places = [[0, 1, 3, 4], [0, 5, 9, 14, 18, 23]]
    raw = torch.stack([by_hand(settings, *one) for one in zip(prompts, videos, places, strict=True)])
    result = torch.stack([scores.parts[f"raw_{name}"] for name in ("vq", "mq", "ta")], dim=1)
    torch.testing.assert_close(result, raw, **CLOSE)
    standardised = (raw - torch.tensor([3.6757, 1.1646, 2.8105])) / torch.tensor([2.2476, 1.3811, 2.5121])
    for column, name in enumerate(("vq", "mq", "ta")):
        torch.testing.assert_close(scores.parts[name], standardised[:, column], **CLOSE)
    torch.testing.assert_close(scores.values, standardised.sum(1), rtol=0, atol=6e-5)
    # Random weights tell the samples and the dimensions apart.
    assert float((raw[0] - raw[1]).abs().min()) > 1e-3


def test_a_head_of_three_rows_reads_one_row_at_each_token(fresh: dict[str, Any], samples: Samples, noise: Clip) -> None:
    file = Path(fresh["model"]) / "checkpoint-10" / "model.pth"
    state = torch.load(file, weights_only=True)
    row = state["base_model.model.rm_head.weight"]
    given = samples([noise(4, 3, 56, 56)])
    one = build(VideoAlignConfig(**fresh), device="cpu").score(given)
    state["base_model.model.rm_head.weight"] = torch.cat([row, 2 * row, 3 * row])
    torch.save(state, file)
    three = build(VideoAlignConfig(**fresh), device="cpu").score(given)
    for factor, name in enumerate(("raw_vq", "raw_mq", "raw_ta"), start=1):
        torch.testing.assert_close(three.parts[name], factor * one.parts[name], **CLOSE)


def test_the_score_may_be_one_dimension(settings: dict[str, Any], samples: Samples, noise: Clip) -> None:
    scores = build(VideoAlignConfig(**settings, score="mq"), device="cpu").score(samples([noise(4, 3, 56, 56)]))
    assert torch.equal(scores.values, scores.parts["mq"])


def test_frames_are_scaled_as_pillow_does(
    settings: dict[str, Any], reward: VideoAlignReward, samples: Samples, noise: Clip
) -> None:
    video = noise(4, 3, 90, 70)
    height, width = smart_resize(90, 70, factor=28, min_pixels=4 * 28**2, max_pixels=12 * 28**2)
    pictures = [Image.fromarray((f * 255).round().byte().permute(1, 2, 0).numpy()) for f in video]
    scaled = [picture.resize((width, height), Image.Resampling.BICUBIC) for picture in pictures]
    expected = torch.stack(
        [torch.frombuffer(bytearray(p.tobytes()), dtype=torch.uint8).view(height, width, 3) for p in scaled]
    )
    own = reward.score(samples([video])).values
    theirs = reward.score(samples([expected.permute(0, 3, 1, 2) / 255])).values
    # Pillow rounds to 8 bits after each pass, by 1.2 / 255 at most, with signs that cancel over 10,000 inputs.
    torch.testing.assert_close(own, theirs, rtol=0, atol=5e-3)


@pytest.mark.parametrize(
    ("total", "rate", "fps", "expected"),
    [
        (2, 8.0, 2.0, [0, 1]),
        (3, 8.0, 2.0, [0, 2]),
        (5, 16.0, 2.0, [0, 1, 3, 4]),
        # 33 / 16 s x 2 = 4.1 frames; 81 / 16 s x 2 = 10.1.
        (33, 16.0, 2.0, [0, 11, 21, 32]),
        (81, 16.0, 2.0, [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]),
        # Half way between two even numbers it is the multiple of four, as Python rounds: 5 becomes 4, 7 becomes 8.
        (20, 8.0, 2.0, [0, 6, 13, 19]),
        (28, 8.0, 2.0, [0, 4, 8, 12, 15, 19, 23, 27]),
        (1000, 1.0, 2.0, [round(999 * place / 767) for place in range(768)]),
    ],
)
def test_the_frames_shown_are_two_a_second(total: int, rate: float, fps: float, expected: list[int]) -> None:
    assert sampled(total, rate=rate, fps=fps) == expected


@pytest.mark.parametrize("size", [(480, 832), (832, 480), (240, 416), (64, 64), (30, 500), (720, 1280), (448, 448)])
def test_the_size_of_frames_is_that_of_qwen(size: tuple[int, int]) -> None:
    least, most = 128 * 28 * 28, 200704
    assert frame_size(size, factor=28, least_px=least, most_px=most) == smart_resize(
        *size, factor=28, min_pixels=least, max_pixels=most
    )


def test_videos_score_the_same_in_any_batch_and_order(
    settings: dict[str, Any], reward: VideoAlignReward, samples: Samples, noise: Clip
) -> None:
    videos = [noise(4, 3, 56, 84), noise(9, 3, 40, 40, seed=1), noise(30, 3, 60, 56, seed=2)]
    prompts = ["a cat", "a cat that runs over the hills and far away", "x"]
    large = build(VideoAlignConfig(**settings, batch_size=3), device="cpu")
    together = large.score(samples(videos, prompts=prompts)).values
    backwards = large.score(samples(videos[::-1], prompts=prompts[::-1])).values.flip(0)
    alone = torch.cat([reward.score(samples([v], prompts=[p])).values for v, p in zip(videos, prompts, strict=True)])
    # Sums in other orders: fp32 through two layers.
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=3e-5)
    torch.testing.assert_close(backwards, alone, rtol=1e-5, atol=3e-5)


def test_the_gradient_is_that_of_finite_differences(reward: VideoAlignReward, samples: Samples, noise: Clip) -> None:
    video = (0.2 + 0.6 * noise(5, 3, 40, 56)).requires_grad_()
    (gradient,) = torch.autograd.grad(reward.score(samples([video])).values.sum(), video)
    # The frames that are shown, and no others.
    assert [bool(frame.any()) for frame in gradient] == [True, True, False, True, True]
    # Along itself, where the slope is largest; Qwen2-VL's norms are in fp32 whatever its dtype.
    direction = gradient / gradient.norm()
    step = 0.05
    with torch.no_grad():
        ends = [float(reward.score(samples([video + side * step * direction])).values) for side in (1, -1)]
    # Rounding of 1e-6 / 0.1 against a slope of 0.1 and more, and curvature of second order.
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float(gradient.norm()), rel=1e-2)


def test_bf16_is_fp32_but_for_its_8_bits(settings: dict[str, Any], samples: Samples, noise: Clip) -> None:
    given = samples([noise(4, 3, 56, 56)])
    full, half = (
        build(VideoAlignConfig(**{**settings, "dtype": dtype}), device="cpu").score(given)
        for dtype in ("float32", "bfloat16")
    )
    assert half.values.dtype == torch.float32
    # A few parts in 256 of raw scores near 1.
    torch.testing.assert_close(half.parts["raw_vq"], full.parts["raw_vq"], rtol=0, atol=0.1)
    assert not torch.equal(half.values, full.values)


def changed(file: Path, section: str, name: str, value: Any) -> None:
    content = json.loads(file.read_text())
    content[section][name] = value
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("section", "name", "value", "message"),
    [
        ("data_config", "fps", None, r"data_config\.fps None, expected a number above 0"),
        ("data_config", "sample_type", "multi_pts", r"data_config\.sample_type 'multi_pts', expected 'uniform'"),
        ("data_config", "prompt_template_type", "none", r"prompt_template_type 'none', expected 'detailed_special'"),
        ("model_config", "use_special_tokens", False, r"use_special_tokens False, expected True"),
        ("inference_config", "MQ_std", 0.0, r"inference_config\.MQ_std 0\.0, expected a number above 0"),
        ("inference_config", "TA_mean", math.nan, r"inference_config\.TA_mean nan, expected a number"),
        ("peft_lora_config", "lora_r", "2", r"peft_lora_config\.lora_r '2', expected a number above 0"),
    ],
)
def test_settings_of_another_variant_are_refused(
    fresh: dict[str, Any], section: str, name: str, value: Any, message: str
) -> None:
    changed(Path(fresh["model"]) / "model_config.json", section, name, value)
    with pytest.raises(RecipeError, match=rf"^reward\.videoalign\.model: .*model_config\.json' has .*{message}"):
        build(VideoAlignConfig(**fresh), device="cpu")


def test_weights_of_another_model_are_refused(fresh: dict[str, Any]) -> None:
    file = Path(fresh["model"]) / "checkpoint-10" / "model.pth"
    whole = torch.load(file, weights_only=True)

    def refusal(weights: dict[str, Tensor]) -> str:
        torch.save(weights, file)
        with pytest.raises(RecipeError, match=r"^reward\.videoalign\.(model|base): ") as caught:
            build(VideoAlignConfig(**fresh), device="cpu")
        return str(caught.value)

    start = "base_model.model."
    head, embeddings = f"{start}rm_head.weight", f"{start}model.embed_tokens.weight"
    assert "reward head of shape [0, 0]" in refusal({k: v for k, v in whole.items() if k != head})
    assert "reward head of shape [2, 32]" in refusal({**whole, head: torch.zeros(2, 32)})
    lacking = f"{start}visual.blocks.1.mlp.fc1.weight"
    assert "lacks 'visual.blocks.1.mlp.fc1.weight'" in refusal({k: v for k, v in whole.items() if k != lacking})
    lora = f"{start}model.layers.0.mlp.up_proj.lora_B.default.weight"
    assert "lacks 'language_model.layers.0.mlp.up_proj.weight'" in refusal(
        {k: v for k, v in whole.items() if k != lora}
    )
    more = torch.cat([whole[embeddings], torch.zeros(1, 32)])
    assert f"has {len(more) - 1} tokens with those of the reward, the weights have {len(more)}" in refusal(
        {**whole, embeddings: more}
    )
    file.unlink()
    with pytest.raises(RecipeError, match=r"has no checkpoint-\*/model\.pth"):
        build(VideoAlignConfig(**fresh), device="cpu")


def test_the_latest_checkpoint_is_loaded(fresh: dict[str, Any], samples: Samples, noise: Clip) -> None:
    folder = Path(fresh["model"])
    state = torch.load(folder / "checkpoint-10" / "model.pth", weights_only=True)
    given = samples([noise(4, 3, 56, 56)])
    first = build(VideoAlignConfig(**fresh), device="cpu").score(given)
    state["base_model.model.rm_head.weight"] *= -1
    (folder / "checkpoint-9").mkdir()
    torch.save(state, folder / "checkpoint-9" / "model.pth")
    assert torch.equal(build(VideoAlignConfig(**fresh), device="cpu").score(given).values, first.values)
    (folder / "checkpoint-11").mkdir()
    torch.save(state, folder / "checkpoint-11" / "model.pth")
    last = build(VideoAlignConfig(**fresh), device="cpu").score(given)
    assert torch.equal(last.parts["raw_vq"], -first.parts["raw_vq"])


def test_a_base_that_is_not_qwen2_vl_is_refused(fresh: dict[str, Any]) -> None:
    file = Path(fresh["base"]) / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(RecipeError, match=r"^reward\.videoalign\.base: .* is a qwen3, expected qwen2_vl"):
        build(VideoAlignConfig(**fresh), device="cpu")


@pytest.mark.parametrize("text", ["{text_prompt}", "<|VQ_reward|> <|MQ_reward|> <|TA_reward|>"])
def test_an_instruction_has_the_prompt_and_each_token(settings: dict[str, Any], tmp_path: Path, text: str) -> None:
    (file := tmp_path / "instruction.txt").write_text(text)
    config = VideoAlignConfig(**{**settings, "instruction": str(file)})
    (reason,) = config.problems(None, None)
    assert isinstance(reason, Reason) and reason.key == ".instruction" and "expected one of each" in reason.text
    (missing,) = VideoAlignConfig(**{**settings, "instruction": ""}).problems(None, None)
    assert "got no file" in missing.text and "DETAILED_PROMPT_WITH_SPECIAL_TOKEN" in missing.text
    assert VideoAlignConfig(**settings).read_files() == {".instruction": Path(settings["instruction"])}


def test_samples_that_cannot_be_scored_are_refused(reward: VideoAlignReward, samples: Samples, noise: Clip) -> None:
    video = noise(4, 3, 56, 56)
    for token in ("<|TA_reward|>", "<|video_pad|>"):
        with pytest.raises(RewardFailed, match=r"^reward\.videoalign: got the prompt .* expected text without control"):
            reward.score(samples([video], prompts=[f"a cat {token}"]))
    with pytest.raises(RewardFailed, match=r"^reward\.videoalign: got 1 frames in sample 's0', expected 2 or more"):
        reward.score(samples([video[:1]]))
    # Not among the frames that are shown: a model that has come apart is noticed all the same.
    broken = torch.cat([video, video])
    broken[1, 0, 0, 0] = float("nan")
    with pytest.raises(RewardFailed, match=r"^reward\.videoalign: sample 's0' .* from nan to nan"):
        reward.score(samples([broken]))
