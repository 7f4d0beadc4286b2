"""Distances of CLIP's features, against the library's own features."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessor, CLIPModel
from unirl.core.roles import ScoreInput
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.rewards.clip_family import tiny
from unirl.rewards.clip_family.config import ClipDiversityConfig
from unirl.rewards.clip_family.diversity import build


def test_it_is_one_less_the_cosine_of_the_libraries_features(tmp_path: Path) -> None:
    tiny.write_clip(tmp_path, seed=0)
    images = torch.randint(0, 256, (4, 3, 48, 48), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    groups = ("a", "b", "a", "a")
    samples = ScoreInput(
        sample_ids=tuple("wxyz"),
        group_ids=groups,
        inputs=Inputs.of_texts(["a photo"] * 4),
        metadata=({},) * 4,
        media=Media(kind="image", values=images),
    )
    model = CLIPModel.from_pretrained(tmp_path).eval()
    processor = CLIPImageProcessor.from_pretrained(tmp_path)
    pixels = processor([Image.fromarray(one.permute(1, 2, 0).numpy()) for one in images], return_tensors="pt")
    with torch.no_grad():
        features = model.get_image_features(**pixels).pooler_output.double()
    apart = 1 - torch.nn.functional.cosine_similarity(features[:, None], features[None], dim=2)
    mean = [(apart[0, 2] + apart[0, 3]) / 2, 0.0, (apart[2, 0] + apart[2, 3]) / 2, (apart[3, 0] + apart[3, 2]) / 2]
    nearest = [min(apart[0, 2], apart[0, 3]), 0.0, min(apart[2, 0], apart[2, 3]), min(apart[3, 0], apart[3, 2])]
    for to, expected in (("all", mean), ("nearest", nearest)):
        values = build(ClipDiversityConfig(path=str(tmp_path), to=to), device="cpu").score(samples).values
        # Cosines in fp32; resizing to 8-bit pixels in the library moves a feature by less than 1e-3 of its length.
        assert values.tolist() == pytest.approx([float(one) for one in expected], abs=2e-3)
        assert float(values[0]) > 1e-3, "the images are told apart"
