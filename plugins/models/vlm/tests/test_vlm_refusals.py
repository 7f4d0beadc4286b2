"""Checkpoints, settings and prompts that cannot be trained with, each with one clear error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText
from unirl.core.errors import DataError, RecipeError
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import TextSamplingConfig
from unirl.model_host.tokens import image_miniature
from unirl.model_host.tokens.miniature import byte_tokenizer, save_random
from unirl.models.vlm.config import VlmConfig
from unirl.models.vlm.model import Vlm, build
from vlm_families import TEXT, VISION, save, tokenizer

OWN_CODE = """
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaModel


class OwnConfig(LlavaConfig):
    model_type = "own"


class OwnModel(LlavaModel):
    config_class = OwnConfig

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        {body}


class OwnForConditionalGeneration(LlavaForConditionalGeneration):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.post_init()
"""
FAITHFUL = "return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)"
# It sees the padding on the left of a prompt.
BLIND = "return super().forward(input_ids, **kwargs)"


def copied(folder: Path, to: Path, **values: object) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **values}))
    return to


def built(path: Path, **settings: Any) -> Vlm:
    return build(VlmConfig(path=str(path), **settings), device="cpu")


def one(*media: MediaRef, text: str = "What is it?") -> Inputs:
    return Inputs(ids=("a",), prompts=(text,), texts=(text,), media=(media,))


@pytest.fixture
def own(folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A checkpoint that brings its own code, with this body of a forward."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))

    def make(body: str) -> Path:
        name = "OwnForConditionalGeneration"
        kinds = {"AutoConfig": "own_code.OwnConfig", "AutoModelForImageTextToText": f"own_code.{name}"}
        to = copied(folder("Llava"), tmp_path / "own", auto_map=kinds, model_type="own", architectures=[name])
        weights = AutoModelForImageTextToText.from_pretrained(folder("Llava"), dtype=torch.float32).state_dict()
        # Only classes of transformers know the names that its checkpoints have.
        save_file(
            {key: value.contiguous() for key, value in weights.items()}, to / "model.safetensors", {"format": "pt"}
        )
        processor = json.loads((to / "processor_config.json").read_text())
        (to / "processor_config.json").write_text(json.dumps({**processor, "processor_class": "LlavaProcessor"}))
        (to / "own_code.py").write_text(OWN_CODE.replace("{body}", body))
        return to

    return make


def test_code_of_a_checkpoint_runs_only_when_it_is_trusted(own: Callable[[str], Path]) -> None:
    path = own(FAITHFUL)
    with pytest.raises(RecipeError, match=r"model\.trust_remote_code: got false, .*Own.*Read that code"):
        built(path)
    assert type(built(path, trust_remote_code=True).trainable).__name__ == "OwnForConditionalGeneration"


def test_an_architecture_that_computes_otherwise_in_batches_is_refused_with_the_number(
    own: Callable[[str], Path],
) -> None:
    with pytest.raises(RecipeError, match=r"'OwnFor.*' gives log-probs that differ by [0-9.]+ in a cached batch"):
        built(own(BLIND), trust_remote_code=True)


def test_other_checkpoints_are_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match=r"model\.path: .*has no config\.json"):
        built(tmp_path / "empty")
    words = byte_tokenizer(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    config = transformers.LlamaConfig(**TEXT, vocab_size=len(words))
    save_random(tmp_path / "text", transformers.LlamaForCausalLM, config, words, seed=0)
    with pytest.raises(RecipeError, match=r"\['LlamaForCausalLM'\], expected .* reads images.*model=causal-lm"):
        built(tmp_path / "text")
    strange = copied(folder("Llava"), tmp_path / "strange", model_type="strange")
    with pytest.raises(RecipeError, match=r"model\.path: transformers does not know the model in .*strange"):
        built(strange)


def test_an_architecture_without_places_of_images_is_refused(tmp_path: Path) -> None:
    """Idefics3 merges images with its own code."""
    words = tokenizer("<image>", {"image_token": "<image>"})
    config = transformers.Idefics3Config(
        text_config={"model_type": "llama", **TEXT, "vocab_size": len(words)},
        vision_config=VISION,
        image_token_id=words.image_token_id,
        scale_factor=2,
    )
    images = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 28}, max_image_size={"longest_edge": 28})
    save(tmp_path / "idefics3", transformers.Idefics3ForConditionalGeneration, config, words, images)
    with pytest.raises(RecipeError, match=r"'Idefics3For.*' has no 'get_placeholder_mask'"):
        built(tmp_path / "idefics3")


def test_incomplete_checkpoints_are_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    for missing, says in (
        ("preprocessor_config.json", r"^model\.path: the image processor in .* does not load"),
        ("tokenizer.json", r"^model\.path: .* has no vocabulary"),
        ("model.safetensors", r"^model\.path: .* does not load"),
    ):
        path = copied(folder("Gemma3"), tmp_path / missing)
        (path / missing).unlink()
        with pytest.raises(RecipeError, match=says):
            built(path)
    plain = copied(folder("Gemma3"), tmp_path / "plain")
    names = json.loads((plain / "tokenizer_config.json").read_text())
    for key in ("image_token", "boi_token", "eoi_token", "extra_special_tokens", "model_specific_special_tokens"):
        names.pop(key, None)
    (plain / "tokenizer_config.json").write_text(json.dumps(names))
    with pytest.raises(RecipeError, match=r"the processor 'Gemma3Processor' of .* does not load: .*special tokens"):
        built(plain)


def test_a_checkpoint_without_a_chat_template_takes_plain_prompts_alone(
    folder: Callable[[str], Path], inputs: Inputs, tmp_path: Path
) -> None:
    path = copied(folder("Llava"), tmp_path / "bare")
    (path / "chat_template.jinja").unlink()
    model = built(path)
    with pytest.raises(RecipeError, match=r"sampling\.chat: got true, but the checkpoint's .* has no chat template"):
        model.prompt_tokens(inputs, sampling=TextSamplingConfig())
    assert len(model.prompt_tokens(inputs, sampling=TextSamplingConfig(chat=False))) == 3


def test_a_chat_template_that_leaves_something_out_is_refused(
    folder: Callable[[str], Path], inputs: Inputs, tmp_path: Path
) -> None:
    for template, settings, says in (
        ("{{ messages[0].role }}:", {}, r"sampling\.chat: .* shows 0 of 1 images"),
        ("<image>", {}, r"sampling\.chat: .* leaves 'What is it\?' out"),
        ("<image>{{ messages[-1].content[-1].text }}", {"system_prompt": "Be brief."}, r"system_prompt: .*'Be brief"),
    ):
        path = copied(folder("Llava"), tmp_path / str(len(template)))
        (path / "chat_template.jinja").write_text(template)
        model = built(path)
        with pytest.raises(RecipeError, match=says):
            model.prompt_tokens(inputs.select([0]), sampling=TextSamplingConfig(**settings))


def test_images_and_prompts_that_cannot_be_read_are_refused(load: Callable[..., Vlm], tmp_path: Path) -> None:
    (good,) = image_miniature.media(tmp_path, number=0)
    (tmp_path / "cut.png").write_bytes(Path(good.uri).read_bytes()[:200])
    for name, says in (("gone.png", "it cannot be opened"), ("cut.png", "the image is broken")):
        ref = MediaRef(modality="image", role="condition", uri=str(tmp_path / name))
        with pytest.raises(DataError, match=rf"{name}' \(condition\): {says}"):
            load("Gemma3").prompt_tokens(one(ref), sampling=TextSamplingConfig())
    for text in ("a <start_of_image>", "a <image_soft_token>"):
        with pytest.raises(DataError, match=r"has the token '<\w+>', which stands for images"):
            load("Gemma3").prompt_tokens(one(good, text=text), sampling=TextSamplingConfig())


def test_pixel_budgets_are_those_of_the_image_processor_or_refused(load: Callable[..., Vlm], tmp_path: Path) -> None:
    media = image_miniature.media(tmp_path, number=1)  # 70 x 35 pixels
    sampling = TextSamplingConfig()

    def sizes(name: str, **settings: Any) -> list[int]:
        return [*load(name, **settings).conditions(one(*media), sampling=sampling)["pixel_values"][0].shape]

    # Patches of 14 x 14; both edges are multiples of 28: 56 x 28 at most 1568 pixels, 112 x 56 at least 6272.
    assert sizes("Qwen3VL", max_pixels=1568, min_pixels=784)[0] == 4 * 2
    assert sizes("Qwen3VL", min_pixels=6272, max_pixels=12544)[0] == 8 * 4
    assert sizes("InternVL")[0] == 3 and sizes("InternVL", image={"crop_to_patches": False})[0] == 1
    with pytest.raises(RecipeError, match=r"model\.max_pixels: the checkpoint's Gemma3.* has no such setting"):
        sizes("Gemma3", max_pixels=1568)
    with pytest.raises(RecipeError, match=r"model\.image\.tiles: .* no such setting, expected one of .*do_resize"):
        sizes("InternVL", image={"tiles": 2})
