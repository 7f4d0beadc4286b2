from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from unirl.core.roles import ScoreInput
from unirl.core.specs.part_config import RewardConfig
from unirl.core.specs.spec import RewardSpec
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.rewards.detect import lettering, tiny
from unirl.rewards.detect.image_input import pictures_of
from unirl.rewards.detect.plugin import unirl_rewards
from unirl.rewards.detect.text_reader import ReaderSettings, TextReader
from unirl.rewards.detect.text_target import normalised


@pytest.mark.parametrize("spec", unirl_rewards(), ids=lambda spec: spec.name)
def test_specs_point_at_what_exists(spec: RewardSpec, tmp_path: Path) -> None:
    files = importlib.import_module("unirl.rewards.detect.tiny").write(tmp_path, seed=0) if spec.tiny else {}
    module, _, name = spec.config.partition(":")
    config = getattr(importlib.import_module(module), name)(**spec.trial, **files)
    assert isinstance(config, RewardConfig)
    module, _, name = spec.build.partition(":")
    getattr(importlib.import_module(module), name)(config, device="cpu").close()


def test_the_plugin_imports_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "PIL", "transformers", "rapidocr", "rapidfuzz"}
    code = f"import sys, unirl.rewards.detect.plugin; print(sorted({heavy!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_same_seed_writes_the_same_checkpoints(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        tiny.write(tmp_path / name, seed=seed)
        tiny.write_grounding_dino(tmp_path / name / "grounding-dino", seed=seed)
    for part in ("detector", "clip", "grounding-dino"):
        one, same, other = ((tmp_path / name / part / "model.safetensors").read_bytes() for name in "abc")
        assert one == same != other


def test_lettering_is_read_as_it_was_written() -> None:
    """Conformance tries `ocr` on it, so it must be legible."""
    reader = TextReader(ReaderSettings(min_confidence=0.5, min_side_px=64, threads=1))
    pages = [lettering.draw(height=64, width=192, seed=seed) for seed in range(10)]
    texts = [reader.read(Image.fromarray((page.permute(1, 2, 0) * 255).byte().numpy())) for page in pages]
    assert [normalised(text) for text in texts] == ["open", "cafe24", "opennow", "cafe42", "closed"] * 2
    assert not torch.equal(pages[0], pages[5])


def test_pictures_of_decoded_pixels_are_those_of_their_levels() -> None:
    decoded = torch.rand(2, 3, 9, 7, generator=torch.Generator().manual_seed(0))
    names = ("a", "b")
    pictures = [
        pictures_of(
            ScoreInput(
                sample_ids=names,
                group_ids=names,
                inputs=Inputs.of_texts(names),
                metadata=({},) * 2,
                media=Media(kind="image", values=values),
            ),
            reward="ocr",
        )
        for values in (decoded, tuple(decoded), (decoded * 255).round().byte())
    ]
    assert len({tuple(picture.tobytes() for picture in each) for each in pictures}) == 1
