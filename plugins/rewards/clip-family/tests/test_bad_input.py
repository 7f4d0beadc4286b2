"""Each wrong checkpoint, file and sample gives one error, with the key or the sample first."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from unirl.core.errors import RecipeError, RewardFailed
from unirl.core.roles import ScoreInput
from unirl.core.types.media import Media

Build = Callable[..., Any]
Tiny = Callable[[str], Mapping[str, Any]]
Samples = Callable[..., ScoreInput]

NAMES = ["aesthetic", "clipscore", "hpsv2", "image-reward", "pickscore", "siglip"]


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("clipscore", "siglip", r"path: .* of model_type 'siglip', expected 'clip' \(CLIPModel\)"),
        ("siglip", "pickscore", r"path: .* of model_type 'clip', expected 'siglip'"),
        ("pickscore", "image-reward", r"path: .*config\.json' cannot be read as JSON"),
        ("image-reward", "clipscore", r"path: .* has no ImageReward\.pt\. Give the folder with ImageReward\.pt and"),
    ],
)
def test_a_checkpoint_of_another_scorer_is_refused(
    build: Build, tiny: Tiny, name: str, other: str, message: str
) -> None:
    with pytest.raises(RecipeError, match=rf"^reward\.{name}\.{message}"):
        build(name, path=tiny(other)["path"])


def test_weights_of_another_scorer_are_refused(build: Build, tiny: Tiny) -> None:
    image_reward = str(Path(tiny("image-reward")["path"]) / "ImageReward.pt")
    with pytest.raises(RecipeError, match=r"^reward\.hpsv2\.weights: .*it lacks 'logit_scale' and .*has the unknown"):
        build("hpsv2", weights=image_reward)
    with pytest.raises(RecipeError, match=r"^reward\.aesthetic\.head: .* layers of shapes \[\], expected 5 linear"):
        build("aesthetic", head=tiny("hpsv2")["weights"])


def test_a_head_for_another_encoder_or_with_activations_is_refused(build: Build, fresh: Tiny) -> None:
    settings = fresh("aesthetic")
    state = torch.load(settings["head"], weights_only=True)
    wide = {**state, "layers.0.weight": torch.zeros(1024, 768)}
    torch.save(wide, settings["head"])
    with pytest.raises(RecipeError, match=r"head: .*\(1024, 768\).* from 24 features to 1"):
        build("aesthetic", **settings)
    # The variant with ReLU: its layers are counted with the activations.
    renamed = {name.replace("layers.2.", "layers.3."): value for name, value in state.items()}
    torch.save(renamed, settings["head"])
    with pytest.raises(RecipeError, match=r"head: .* expected 5 linear layers, named layers\.0\.weight to layers\.7"):
        build("aesthetic", **settings)


@pytest.mark.parametrize(
    ("name", "setting", "value", "message"),
    [
        ("aesthetic", "head", "", r"got no file\. .* sac\+logos\+ava1-l14-linearMSE\.pth of github"),
        ("aesthetic", "head", "/nowhere/head.pth", r"there is no file '/nowhere/head\.pth'\. Give a file, or one on"),
        ("hpsv2", "weights", "missing.pt", r"there is no file 'missing\.pt'"),
        ("pickscore", "path", "/nowhere", r"there is no folder '/nowhere', and it is not a hub id"),
        ("image-reward", "processor", "/nowhere", r"there is no folder '/nowhere'"),
    ],
)
def test_a_missing_file_is_named_by_its_key(build: Build, name: str, setting: str, value: str, message: str) -> None:
    with pytest.raises(RecipeError, match=rf"^reward\.{name}\.{setting}: {message}"):
        build(name, **{setting: value})


def test_an_id_that_cannot_be_fetched_is_named(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError, match=r"^reward\.hpsv2\.weights: .* cannot be fetched from the hub"):
        build("hpsv2", weights="owner/name/file.pt")
    with pytest.raises(RecipeError, match=r"^reward\.clipscore\.path: .* cannot be fetched from the hub"):
        build("clipscore", path="owner/name")


@pytest.mark.parametrize(
    ("name", "file", "tensor"),
    [
        ("hpsv2", "HPS_v2.1_compressed.pt", "transformer.resblocks.1.mlp.c_fc.weight"),
        ("image-reward", "ImageReward.pt", "blip.text_encoder.encoder.layer.1.crossattention.self.key.weight"),
        ("image-reward", "ImageReward.pt", "mlp.layers.4.bias"),
        ("aesthetic", "sac+logos+ava1-l14-linearMSE.pth", "layers.6.bias"),
    ],
)
def test_a_state_dict_without_a_tensor_is_refused(build: Build, fresh: Tiny, name: str, file: str, tensor: str) -> None:
    settings = fresh(name)
    path = Path(settings["path"]) / file
    state = torch.load(path, weights_only=True)
    del (state.get("state_dict", state))[tensor]
    torch.save(state, path)
    with pytest.raises(
        RecipeError, match=rf"^reward\.{name}\.\w+: .*{re.escape(path.name)}.* it lacks '.*' and 0 more"
    ):
        build(name, **settings)


def test_safetensors_without_a_tensor_are_refused(build: Build, fresh: Tiny) -> None:
    """transformers would fill the hole with random numbers."""
    settings = fresh("clipscore")
    file = Path(settings["path"]) / "model.safetensors"
    state = load_file(file)
    del state["visual_projection.weight"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(RecipeError, match=r"^reward\.clipscore\.path: .* lack 'visual_projection\.weight' and 0 more"):
        build("clipscore", **settings)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("hpsv2", "HPS_v2.1_compressed.pt"),
        ("image-reward", "ImageReward.pt"),
        ("aesthetic", "sac+logos+ava1-l14-linearMSE.pth"),
        ("siglip", "model.safetensors"),
    ],
)
def test_a_file_that_is_cut_off_does_not_load(build: Build, fresh: Tiny, name: str, file: str) -> None:
    settings = fresh(name)
    path = Path(settings["path"]) / file
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(RecipeError, match=rf"^reward\.{name}\.\w+: .* does not load.* Fetch it again"):
        build(name, **settings)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("the pickled code ran",))


def test_pickled_code_is_not_run(build: Build, fresh: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    settings = fresh("image-reward")
    torch.save({"blip": Bomb()}, Path(settings["path"]) / "ImageReward.pt")
    with pytest.raises(RecipeError, match=r"^reward\.image-reward\.path: .* holds more than tensors"):
        build("image-reward", **settings)
    (Path(settings["path"]) / "ImageReward.pt").write_bytes(pickle.dumps(Bomb(), protocol=2))
    with pytest.raises(RecipeError, match=r"^reward\.image-reward\.path: .* holds more than tensors"):
        build("image-reward", **settings)
    assert "ran" not in capsys.readouterr().out


def test_a_file_that_is_no_state_dict_is_refused(build: Build, fresh: Tiny) -> None:
    settings = fresh("aesthetic")
    torch.save([torch.zeros(1)], settings["head"])
    with pytest.raises(RecipeError, match=r"^reward\.aesthetic\.head: .* is not a state dict of tensors"):
        build("aesthetic", **settings)


def test_a_folder_without_a_vocabulary_is_refused(build: Build, fresh: Tiny) -> None:
    settings = fresh("clipscore")
    (Path(settings["path"]) / "tokenizer.json").unlink()
    with pytest.raises(RecipeError, match=r"^reward\.clipscore\.processor: .* has no vocabulary"):
        build("clipscore", **settings)


def test_a_med_config_without_a_key_is_refused(build: Build, fresh: Tiny) -> None:
    settings = fresh("image-reward")
    file = Path(settings["path"]) / "med_config.json"
    config = json.loads(file.read_text())
    del config["num_attention_heads"]
    file.write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=r"path: med_config\.json lacks 'num_attention_heads'"):
        build("image-reward", **settings)


def test_settings_are_checked(build: Build) -> None:
    with pytest.raises(RecipeError, match=r"reward\.siglip\.batch_size.*0.*1 or more"):
        build("siglip", batch_size=0)
    with pytest.raises(RecipeError, match=r"reward\.pickscore\.dtype.*float16.*float32, bfloat16"):
        build("pickscore", dtype="float16")


@pytest.mark.parametrize("name", NAMES)
def test_videos_are_refused(build: Build, samples: Samples, name: str) -> None:
    images = samples(torch.zeros(2, 3, 8, 8))
    videos = Media(kind="video", values=torch.zeros(2, 4, 3, 8, 8), rate=8.0)
    batch = ScoreInput(
        sample_ids=images.sample_ids,
        group_ids=images.group_ids,
        inputs=images.inputs,
        metadata=images.metadata,
        media=videos,
    )
    with pytest.raises(RewardFailed, match=rf"^reward\.{name}: got video, expected image"):
        build(name).score(batch)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("value", "said"), [(float("nan"), "from nan to nan"), (-0.5, "from -0.5 to 0"), (2.0, "to 2")]
)
def test_bad_pixels_name_their_sample(build: Build, samples: Samples, name: str, value: float, said: str) -> None:
    images: Tensor = torch.zeros(3, 3, 8, 8)
    images[2, 1, 3, 3] = value
    with pytest.raises(RewardFailed, match=rf"^reward\.{name}: sample 's2' \(prompt 'x'\) has values .*{said}; pixels"):
        build(name, batch_size=2).score(samples(images))


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch_is_refused(build: Build, samples: Samples, name: str) -> None:
    reward = build(name)
    for images in (torch.zeros(0, 3, 32, 32), ()):
        with pytest.raises(RewardFailed, match=rf"^reward\.{name}: got no samples, expected 1 or more"):
            reward.score(samples(images, []))


def test_the_plugin_imports_nothing_heavy() -> None:
    code = "import sys, unirl.rewards.clip_family.plugin; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
