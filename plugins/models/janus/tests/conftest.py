"""A miniature of Janus, by this package and by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from miniatures import folder_of, model_of
from unirl.models.janus import tiny
from unirl.models.janus.config import JanusConfig
from unirl.models.janus.model import JanusModel, build

tiny_folder = folder_of("janus", tiny.write)
model = model_of(build, JanusConfig)


@pytest.fixture(scope="session")
def plain(tiny_folder: Path, model: JanusModel) -> Any:
    """transformers' own, told what marks a sequence and an image, as published checkpoints tell it."""
    result = transformers.JanusForConditionalGeneration.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    result.generation_config.bos_token_id = model.tokenizer.bos_token_id
    result.generation_config.generation_kwargs = {
        "boi_token_id": model.tokenizer.convert_tokens_to_ids("<begin_of_image>")
    }
    return result
