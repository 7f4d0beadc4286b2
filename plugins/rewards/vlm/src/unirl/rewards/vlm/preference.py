"""Rewards with heads on a Qwen-VL: HPSv3 for images, EditReward for edits. A head gives a mean and a sigma.

Sources: HPSv3, arXiv 2508.03789, and the checkpoint MizzenAI/HPSv3; EditReward, arXiv 2509.26346, and the checkpoints
TIGER-Lab/EditReward-*; what they compute is in their packages hpsv3 1.0.0 and EditReward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig
from transformers.utils import logging as transformers_logging
from unirl.core.errors import RecipeError, RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.check import check_config
from unirl.model_host.model_files import check_contained, contained_file, dtype_of, no_progress_bars

from .chat import Chat, missing_weights
from .config import REWARD_TOKEN, EditRewardConfig, HeadConfig, Hpsv3Config, instruction_of
from .question import Question, pictures_of, sources_of

__all__ = ["HEAD_WIDTHS", "HPSV3_SCALE", "EditReward", "Hpsv3Reward", "build_edit_reward", "build_hpsv3", "head_of"]

HEAD_WIDTHS = (1024, 16, 2)
HPSV3_SCALE = 15.0
"""Good images get a mean of about this."""


def build_hpsv3(config: Hpsv3Config, *, device: Any) -> Hpsv3Reward:
    """Raises RecipeError for settings or a checkpoint that cannot be used."""
    return Hpsv3Reward(config, device=device)


def build_edit_reward(config: EditRewardConfig, *, device: Any) -> EditReward:
    """Raises RecipeError for settings or a checkpoint that cannot be used."""
    return EditReward(config, device=device)


def head_of(hidden_size: int) -> nn.Sequential:
    """A head; its places are the published names, of which the dropout in training was one."""
    first, second, last = HEAD_WIDTHS
    return nn.Sequential(
        nn.Linear(hidden_size, first),
        nn.ReLU(),
        nn.Identity(),
        nn.Linear(first, second),
        nn.ReLU(),
        nn.Linear(second, last),
    )


class _Heads:
    """The model, and a head for each instruction."""

    def __init__(self, config: HeadConfig, *, device: Any) -> None:
        self._config, self._key = config, f"reward.{config.reward}"
        check_config(config, key=self._key)
        self._instructions = [instruction_of(config, name) for name in config.heads.values()]
        dtype = dtype_of(config.dtype, key=f"{self._key}.dtype", model=f"reward {config.reward!r}")
        weights = _weights(config, key=f"{self._key}.model")
        base = str(Path(config.base).expanduser())
        check_contained(Path(base), key=f"{self._key}.base")
        try:
            with no_progress_bars(transformers_logging):
                self._chat = Chat(base, key=self._key, device=device, dtype=dtype, control_tokens=[REWARD_TOKEN])
                self._trunk = _trunk(base, weights, dtype).eval().requires_grad_(False).to(device)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise RecipeError(
                f"{self._key}.base: {config.base!r} does not load with the weights of {config.model!r}: {error}"
            ) from error
        self._chat.tokenizer.add_special_tokens({"additional_special_tokens": [REWARD_TOKEN]})
        self._token: int = self._chat.tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
        size = {"shortest_edge": config.num_pixels, "longest_edge": config.num_pixels}
        self._chat.processor.image_processor.size = size
        self._heads: list[nn.Module] = []
        for prefix in config.heads:
            # fp32 whatever the trunk's dtype, as it was trained.
            head = head_of(weights[f"{prefix}.0.weight"].shape[1]).float()
            head.load_state_dict({place: weights[f"{prefix}.{place}"] for place in head.state_dict()})
            self._heads.append(head.requires_grad_(False).to(device))

    def close(self) -> None:
        """Nothing to release."""

    def _outputs(self, prompts: Sequence[str], shown: Sequence[tuple[Image.Image, ...]]) -> list[Tensor]:
        """[N, 2] fp32 on the CPU of each head, under its own instruction."""
        size = self._config.batch_size
        for prompt in prompts:
            self._chat.check(prompt)
        result: list[Tensor] = []
        for instruction, head in zip(self._instructions, self._heads, strict=True):
            questions = [
                Question(
                    text=re.sub(r"\{(?:text_)?prompt\}", lambda _, given=prompt: given, instruction), images=images
                )
                for prompt, images in zip(prompts, shown, strict=True)
            ]
            with torch.no_grad():
                batches = [self._batch(questions[at : at + size], head) for at in range(0, len(questions), size)]
            result.append(torch.cat(batches).cpu())
        return result

    def _batch(self, questions: Sequence[Question], head: nn.Module) -> Tensor:
        inputs = self._chat.inputs(questions)
        # Both packages hand the decoder embeddings without token ids, so that its positions count tokens, those of
        # images among them, instead of Qwen-VL's time, height and width. The weights were trained so.
        positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        hidden: Tensor = self._trunk(**inputs, position_ids=positions.expand(3, -1, -1)).last_hidden_state
        return head(hidden[inputs["input_ids"] == self._token].float())


class Hpsv3Reward(_Heads):
    def score(self, samples: ScoreInput) -> Scores:
        """mu / 15 of each image; components `mu` and `sigma` as the head gives them."""
        pictures = pictures_of(samples, reward="hpsv3", num_frames=1)
        mu, sigma = self._outputs(samples.inputs.prompts, pictures)[0].unbind(1)
        return Scores(values=mu / HPSV3_SCALE, parts={"mu": mu, "sigma": sigma})


class EditReward(_Heads):
    def score(self, samples: ScoreInput) -> Scores:
        """Mean over both heads of the mean that they give an edit, shown after its source, as published.

        Components: `following` and `quality`, the mean of each head; `following_sigma` and `quality_sigma`, its second
        output as it is. Raises RewardFailed for a sample without a source image, or with several.
        """
        pictures = pictures_of(samples, reward="edit-reward", num_frames=1)
        shown: list[tuple[Image.Image, ...]] = []
        for row, sources in enumerate(sources_of(samples, reward="edit-reward")):
            if len(sources) != 1:
                raise RewardFailed(
                    f"{self._key}: sample {samples.sample_ids[row]!r} (prompt {samples.inputs.prompts[row]!r}) has "
                    f"{len(sources)} source images, expected one, as the heads were trained."
                )
            shown.append((*sources, *pictures[row]))
        following, quality = self._outputs(samples.inputs.prompts, shown)
        parts = {"following": following[:, 0], "quality": quality[:, 0]}
        sigmas = {"following_sigma": following[:, 1], "quality_sigma": quality[:, 1]}
        return Scores(values=(following[:, 0] + quality[:, 0]) / 2, parts={**parts, **sigmas})


def _weights(config: HeadConfig, *, key: str) -> dict[str, Tensor]:
    """The published file, checked for its heads."""
    folder, file = Path(config.model).expanduser(), config.weights
    try:
        if not folder.is_dir():
            folder = Path(snapshot_download(config.model, allow_patterns=[file]))
        weights = load_file(contained_file(folder, file, key=key))
    except (OSError, ValueError, SafetensorError) as error:
        raise RecipeError(
            f"{key}: {config.model!r} does not load: {error} Give a folder with {file}, or the hub id of one. Pickled "
            "weights (.pth) are not loaded; save them as safetensors."
        ) from error
    for prefix in config.heads:
        names = [f"{prefix}.{place}.bias" for place in (0, 3, 5)]
        widths = [weights[name].shape[0] for name in names if name in weights]
        if tuple(widths) != HEAD_WIDTHS:
            raise RecipeError(
                f"{key}: {config.model!r} has a head of {widths or 'no layers'}, expected {list(HEAD_WIDTHS)} under "
                f"{prefix}. Give a checkpoint of {config.reward}."
            )
    return weights


def _trunk(base: str, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """The model below the heads; transformers knows both namings of its weights."""
    settings: Any = AutoConfig.from_pretrained(base, trust_remote_code=False)
    own = {name: value for name, value in weights.items() if not name.startswith("rm_head")}
    # The tokenizer's length with the reward token, shorter than that of the base.
    embeddings = next((name for name in own if name.endswith("embed_tokens.weight")), None)
    if embeddings is None:
        raise KeyError("the weights lack embed_tokens.weight.")
    settings.text_config.vocab_size = own[embeddings].shape[0]
    cls: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(settings)]
    model, report = cls.from_pretrained(
        None, config=settings, state_dict=own, dtype=dtype, output_loading_info=True, trust_remote_code=False
    )
    if missing := sorted({*report["missing_keys"], *map(str, report["mismatched_keys"])} - {"lm_head.weight"}):
        raise KeyError(f"the weights lack {missing_weights(missing)}.")
    return model.model
