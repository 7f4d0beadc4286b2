"""The half of the bridge to vLLM-Omni that runs in UniRL's process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from unirl.core.errors import RecipeError
from unirl.engine_host.latent_engine import fitting_bridge
from unirl.engine_host.source_files import source_files
from unirl.engines.vllm_omni.plugin import SPEC
from unirl.models.hunyuan_image3.bridges.vllm_omni import BRIDGE
from unirl.models.hunyuan_image3.config import HunyuanImageConfig
from unirl.models.hunyuan_image3.model import HunyuanImageModel, build


def test_the_checkpoint_is_the_model_s_unless_the_engine_has_its_own(
    model: HunyuanImageModel, tiny_folder: Path, tmp_path: Path
) -> None:
    assert BRIDGE.checkpoint(model, "") == model.folder
    assert BRIDGE.checkpoint(model, str(tiny_folder)) == tiny_folder
    with pytest.raises(RecipeError, match=r"^model\.path: "):
        BRIDGE.checkpoint(model, str(tmp_path))


def test_the_vit_and_the_vae_have_the_dtypes_of_training(tiny_folder: Path) -> None:
    config = HunyuanImageConfig(path=str(tiny_folder), vae_dtype="bfloat16")
    result = BRIDGE.settings(build(config, device="cpu"))
    assert json.loads(json.dumps(result)) == {"vision_dtype": "float32", "vae_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"moe_topk": [1, 2]}, r"^engine: got a checkpoint in which a token takes one expert \(moe_topk 1\)"),
        (
            {"intermediate_size": 48},
            r"^engine: got a checkpoint whose intermediate_size is 48, .* moe_intermediate_size",
        ),
    ],
)
def test_a_checkpoint_that_vllm_omni_computes_otherwise_is_refused(
    tiny_folder: Path, tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny_folder, folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    other = build(HunyuanImageConfig(path=str(folder)), device="cpu")
    with pytest.raises(RecipeError, match=message):
        fitting_bridge(other, SPEC)


def test_all_that_the_engine_s_process_imports_is_sent_to_it() -> None:
    """The pipeline, which only that process can import, included; and nothing that trains."""
    names = source_files([BRIDGE.__module__])
    assert "unirl.models.hunyuan_image3.bridges.vllm_omni_pipeline" in names
    assert not names.keys() & {"unirl.models.hunyuan_image3.model", "unirl.models.hunyuan_image3.plugin"}
