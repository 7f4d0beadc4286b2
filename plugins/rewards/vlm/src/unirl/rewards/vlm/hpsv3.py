"""HPSv3: human preference as a mean and a sigma, from a reward head on Qwen2-VL.

Source: HPSv3, arXiv 2508.03789; layout of the checkpoint MizzenAI/HPSv3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, Qwen2VLModel
from transformers.utils import logging as transformers_logging
from unirl.core.errors import RecipeError, RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.check import check_config
from unirl.numerics.model_files import dtype_of, no_progress_bars

from .config import REWARD_TOKEN, Hpsv3Config, instruction_of
from .local import load_processor
from .question import pictures_of

__all__ = ["HEAD_WIDTHS", "SCALE", "WEIGHTS", "Hpsv3Reward", "build", "head_of"]

_KEY = "reward.hpsv3"
WEIGHTS = "HPSv3.safetensors"
HEAD_WIDTHS = (1024, 16, 2)
SCALE = 15.0
"""Good images get a mean of about this."""


def build(config: Hpsv3Config, *, device: Any) -> Hpsv3Reward:
    """Raises RecipeError for settings or a checkpoint that cannot be used."""
    return Hpsv3Reward(config, device=device)


def head_of(hidden_size: int) -> nn.Sequential:
    """The head; its places are the published names, of which the dropout in training was one."""
    first, second, last = HEAD_WIDTHS
    return nn.Sequential(
        nn.Linear(hidden_size, first),
        nn.ReLU(),
        nn.Identity(),
        nn.Linear(first, second),
        nn.ReLU(),
        nn.Linear(second, last),
    )


class Hpsv3Reward:
    def __init__(self, config: Hpsv3Config, *, device: Any) -> None:
        check_config(config, key=_KEY)
        self._config, self._device = config, device
        self._instruction = instruction_of(Path(config.instruction).expanduser())
        self._dtype = dtype_of(config.dtype, key=f"{_KEY}.dtype", model="reward 'hpsv3'")
        weights = _weights(config.model)
        try:
            with no_progress_bars(transformers_logging):
                self._processor = load_processor(str(Path(config.base).expanduser()))
                self._trunk = _trunk(config, weights, self._dtype).eval().requires_grad_(False).to(device)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise RecipeError(
                f"{_KEY}.base: {config.base!r} does not load as Qwen2-VL with the weights of {config.model!r}: {error}"
            ) from error
        tokenizer: Any = self._processor.tokenizer
        self._control_tokens = [*tokenizer.all_special_tokens, REWARD_TOKEN]
        tokenizer.add_special_tokens({"additional_special_tokens": [REWARD_TOKEN]})
        self._token: int = tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
        self._processor.image_processor.size = {
            "shortest_edge": config.num_pixels,
            "longest_edge": config.num_pixels,
        }
        self._head = head_of(weights["rm_head.0.weight"].shape[1]).float()
        # fp32 whatever the trunk's dtype, as it was trained.
        self._head.load_state_dict(
            {k.removeprefix("rm_head."): v for k, v in weights.items() if k.startswith("rm_head.")}
        )
        self._head.requires_grad_(False).to(device)

    def score(self, samples: ScoreInput) -> Scores:
        """mu / 15 of each image; components `mu` and `sigma` as the head gives them."""
        pictures = pictures_of(samples, reward="hpsv3", num_frames=1)
        size = self._config.batch_size
        with torch.no_grad():
            out = [
                self._batch(samples.inputs.prompts[start : start + size], pictures[start : start + size])
                for start in range(0, len(pictures), size)
            ]
        mu, sigma = torch.cat(out).cpu().unbind(1)
        return Scores(values=mu / SCALE, parts={"mu": mu, "sigma": sigma})

    def close(self) -> None:
        """Nothing to release."""

    def _batch(self, prompts: Any, pictures: Any) -> Tensor:
        """[n, 2] fp32."""
        chats: list[Any] = []
        for prompt in prompts:
            special = next((word for word in self._control_tokens if word in prompt), None)
            if special is not None:
                raise RewardFailed(
                    f"{_KEY}: the prompt {prompt[:200]!r} holds {special!r}, a control token of the checkpoint. "
                    "Take it out of the prompt."
                )
            text = re.sub(r"\{(?:text_)?prompt\}", lambda _, given=prompt: given, self._instruction)
            chats.append([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}])
        inputs = self._processor(
            text=self._processor.apply_chat_template(chats, tokenize=False, add_generation_prompt=True),
            images=[list(shown) for shown in pictures],
            padding=True,
            padding_side="left",
            return_tensors="pt",
        ).to(device=self._device, dtype=self._dtype)
        hidden: Tensor = self._trunk(**inputs).last_hidden_state
        return self._head(hidden[inputs["input_ids"] == self._token].float())


def _weights(model: str) -> dict[str, Tensor]:
    """The published file, checked for its head."""
    folder = Path(model).expanduser()
    try:
        if not folder.is_dir():
            folder = Path(snapshot_download(model, allow_patterns=[WEIGHTS]))
        weights = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise RecipeError(
            f"{_KEY}.model: {model!r} does not load: {error} Give a folder with {WEIGHTS}, or the hub id of one."
        ) from error
    wide = [weights[f"rm_head.{place}.bias"].shape[0] for place in (0, 3, 5) if f"rm_head.{place}.bias" in weights]
    if tuple(wide) != HEAD_WIDTHS:
        raise RecipeError(
            f"{_KEY}.model: {model!r} has a head of {wide or 'no layers'}, expected {list(HEAD_WIDTHS)} under rm_head. "
            "Give a checkpoint of HPSv3."
        )
    return weights


def _trunk(config: Hpsv3Config, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """The Qwen2-VL below the head, without its language head."""
    settings: Any = AutoConfig.from_pretrained(str(Path(config.base).expanduser()))
    # transformers named its modules otherwise before 4.52.
    names = {name: re.sub(r"^model\.(?!visual\.|language_model\.)", "model.language_model.", name) for name in weights}
    own = {
        new.removeprefix("model."): weights[name]
        for name, new in names.items()
        if not name.startswith(("rm_head.", "lm_head."))
    }
    # The tokenizer's length with the reward token, shorter than that of the base.
    settings.text_config.vocab_size = own["language_model.embed_tokens.weight"].shape[0]
    loaded: Any = Qwen2VLModel.from_pretrained(
        None, config=settings, state_dict=own, dtype=dtype, output_loading_info=True
    )
    trunk, report = loaded
    if missing := sorted({*report["missing_keys"], *report["mismatched_keys"]}):
        raise KeyError(f"the weights lack {missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''}.")
    return trunk
