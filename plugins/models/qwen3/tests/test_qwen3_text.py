"""Prompts, chat templates, texts and the tokens that end them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import TextRequest
from unirl.core.types.sampling import TextSamplingConfig
from unirl.models.qwen3.config import Qwen3Config
from unirl.models.qwen3.model import Qwen3Model, build
from unirl.numerics.tokens.rollout import generate_text


def shown(model: Qwen3Model, prompt: str, **sampling: object) -> str:
    """The prompt as the model sees it, special tokens written out."""
    (tokens,) = model.prompt_tokens(Inputs.of_texts([prompt]), sampling=TextSamplingConfig(**sampling))  # type: ignore[arg-type]
    assert tokens.dtype is torch.int64 and tokens.device.type == "cpu"
    return model.tokenizer.decode(tokens)


def test_a_prompt_is_put_in_the_chat_template(model: Qwen3Model) -> None:
    assert shown(model, "ab ü") == "<|im_start|>user\nab ü<|im_end|>\n<|im_start|>assistant\n"
    assert shown(model, "a", system_prompt="Be brief.") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )


def test_thinking_goes_to_the_template(model: Qwen3Model) -> None:
    opened = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert shown(model, "a", thinking=True) == shown(model, "a", thinking=None) == opened
    assert shown(model, "a", thinking=False) == opened + "<think>\n\n</think>\n\n"


def test_special_tokens_of_a_chat_are_single_tokens(model: Qwen3Model) -> None:
    (tokens,) = model.prompt_tokens(Inputs.of_texts(["a"]), sampling=TextSamplingConfig())
    assert tokens[0] == model.tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_a_raw_prompt_is_taken_as_it_stands(model: Qwen3Model) -> None:
    assert shown(model, "once upon", chat=False) == "once upon"
    for key, value in (("system_prompt", "Be brief."), ("thinking", False)):
        with pytest.raises(RecipeError, match=rf"sampling\.{key}: .*sampling\.chat=false"):
            shown(model, "a", chat=False, **{key: value})


def test_a_prompt_that_fills_the_positions_of_the_checkpoint_is_refused(model: Qwen3Model) -> None:
    raw = TextSamplingConfig(chat=False)
    (word,) = model.tokenizer("a")["input_ids"]
    positions = model.causal_lm.config.max_position_embeddings
    for length in (positions - 1, positions):
        prompt = model.tokenizer.decode([word] * length)
        assert len(model.tokenizer(prompt)["input_ids"]) == length
        if length < positions:
            assert len(model.prompt_tokens(Inputs.of_texts([prompt]), sampling=raw)[0]) == length
            continue
        with pytest.raises(RecipeError, match=rf"has {length} tokens; the checkpoint has {positions} positions"):
            model.prompt_tokens(Inputs.of_texts([prompt]), sampling=raw)


def test_a_prompt_without_a_token_is_refused(model: Qwen3Model) -> None:
    with pytest.raises(RecipeError, match=r"prompt '' has no tokens"):
        shown(model, "", chat=False)
    assert "user\n<|im_end|>" in shown(model, "")


def test_texts_leave_special_tokens_out_and_keep_thoughts(model: Qwen3Model) -> None:
    written = ("<think>\nü\n</think>\n\n 42 .<|im_end|>", "", "<|im_end|>")
    tokens = [torch.tensor(model.tokenizer(text)["input_ids"], dtype=torch.int64) for text in written]
    assert model.texts(tokens) == ["<think>\nü\n</think>\n\n 42 .", "", ""]


def changed(folder: Path, to: Path, file: str, **values: object) -> Path:
    """A copy of a checkpoint with other values in one of its JSON files; None takes a key out."""
    shutil.copytree(folder, to)
    data = {**json.loads((to / file).read_text()), **values}
    (to / file).write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    return to


def test_a_checkpoint_without_a_template_names_the_key(tmp_path: Path, folder: Callable[..., Path]) -> None:
    shutil.copytree(folder(), tmp_path / "raw")
    (tmp_path / "raw" / "chat_template.jinja").unlink()
    model = build(Qwen3Config(path=str(tmp_path / "raw")), device="cpu")
    with pytest.raises(RecipeError, match=r"sampling\.chat: got true, but .*no chat template.*sampling\.chat=false"):
        shown(model, "a")
    assert shown(model, "a", chat=False) == "a"


def test_a_template_without_the_switch_or_with_a_mistake_is_refused(
    tmp_path: Path, folder: Callable[..., Path]
) -> None:
    shutil.copytree(folder(), tmp_path / "plain")
    template = tmp_path / "plain" / "chat_template.jinja"
    template.write_text("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}Q:")
    model = build(Qwen3Config(path=str(tmp_path / "plain")), device="cpu")
    with pytest.raises(RecipeError, match=r"sampling\.thinking: got False, but .*no such switch"):
        shown(model, "a", thinking=False)
    with pytest.raises(RecipeError, match=r"sampling\.chat: the checkpoint's chat template fails: no system"):
        shown(model, "a", system_prompt="Be brief.")


def test_texts_end_at_the_tokens_of_the_checkpoint(
    tmp_path: Path, folder: Callable[..., Path], model: Qwen3Model
) -> None:
    end, pad = (model.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))
    assert model.stop_tokens == (end, pad)
    assert model.pad_token == pad
    one = changed(folder(), tmp_path / "one", "generation_config.json", eos_token_id=7)
    assert build(Qwen3Config(path=str(one)), device="cpu").stop_tokens == (7,)
    bare = changed(folder(), tmp_path / "bare", "tokenizer_config.json", pad_token=None)
    (bare / "generation_config.json").unlink()
    result = build(Qwen3Config(path=str(bare)), device="cpu")
    assert result.stop_tokens == (end,)
    assert result.pad_token == end


@pytest.mark.parametrize("name", ["model.embed_tokens", "model.layers.1.mlp.up_proj", "lm_head"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}])
def test_sampling_from_weights_that_are_not_finite_names_the_layer(
    load: Callable[..., Qwen3Model], name: str, settings: dict[str, Any]
) -> None:
    model = load("untied")
    broken: Any = model.trainable.get_submodule(name)
    broken.weight.data.fill_(torch.nan)
    sampling = TextSamplingConfig(max_new_tokens=3, **settings)
    prompts = model.prompt_tokens(Inputs.of_texts(["a", "What is it?"]), sampling=sampling)
    request = TextRequest(sampling=sampling, prompt_tokens=tuple(prompts), stop_tokens=model.stop_tokens, seeds=(1, 2))
    layer = rf", first at layer '{name}' \(\w+\)"
    with pytest.raises(
        RunFailed, match=rf"^model 'qwen3': logits are not finite{layer}: the weight '{name}.weight' is"
    ):
        generate_text(model, request)
