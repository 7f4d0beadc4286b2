"""Checkpoints that cannot be trained, each with one clear error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from causal_lm_families import COMMON, write
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from unirl.core.errors import DataError, RecipeError
from unirl.core.specs.facts import names_in
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import TextSamplingConfig
from unirl.model_host.tokens.miniature import byte_tokenizer, save_random
from unirl.models.causal_lm import tiny
from unirl.models.causal_lm.config import AutoCausalLmConfig
from unirl.models.causal_lm.model import AutoCausalLm, build
from unirl.models.causal_lm.plugin import SPEC
from unirl.train_host.adapters import add_lora
from unirl.train_host.sections import LoraSettings

OWN_CODE = """
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaModel):
    config_class = OwnConfig

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        {body}


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.post_init()
"""
FAITHFUL = "return super().forward(input_ids, attention_mask=attention_mask, **kwargs)"
# It sees the padding on the left of a prompt.
BLIND = "return super().forward(input_ids, **{**kwargs, 'position_ids': None})"
NO_CACHE = "kwargs.pop('past_key_values'); return super().forward(input_ids, attention_mask=attention_mask, **kwargs)"


def changed(folder: Path, to: Path, **values: object) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **values}))
    return to


@pytest.fixture
def own(folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A checkpoint that brings its own code, with this body of a forward."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))

    def make(body: str) -> Path:
        kinds = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
        to = changed(
            folder("Llama"), tmp_path / "own", auto_map=kinds, model_type="own", architectures=["OwnForCausalLM"]
        )
        (to / "own_code.py").write_text(OWN_CODE.replace("{body}", body))
        return to

    return make


def test_code_of_a_checkpoint_runs_only_when_it_is_trusted(own: Callable[[str], Path]) -> None:
    path = str(own(FAITHFUL))
    says = (
        r"model\.trust_remote_code: got false, .*'OwnForCausalLM'.*brings 'own_code\.OwnForCausalLM'\. Read that code"
    )
    with pytest.raises(RecipeError, match=says):
        build(AutoCausalLmConfig(path=path), device="cpu")
    model = build(AutoCausalLmConfig(path=path, trust_remote_code=True), device="cpu")
    assert type(model.trainable).__name__ == "OwnForCausalLM"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (BLIND, r"gives log-probs that differ by [0-9.]+ in a cached batch from those of each text alone, expected at"),
        (NO_CACHE, r"does not take padded batches and a cache as transformers' usual models do: "),
    ],
    ids=["blind to masks", "without a cache"],
)
def test_an_architecture_that_computes_otherwise_in_batches_is_refused_with_the_number(
    body: str, says: str, own: Callable[[str], Path]
) -> None:
    with pytest.raises(RecipeError, match=f"model.path: 'OwnForCausalLM' {says}"):
        build(AutoCausalLmConfig(path=str(own(body)), trust_remote_code=True), device="cpu")


def test_a_model_of_another_task_or_unknown_is_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    ranks = changed(folder("Llama"), tmp_path / "ranks", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(RecipeError, match=r"checkpoint of \['LlamaForSeq.*expected a causal .*here LlamaForCausalLM"):
        build(AutoCausalLmConfig(path=str(ranks)), device="cpu")
    strange = changed(folder("Llama"), tmp_path / "strange", model_type="strange")
    with pytest.raises(RecipeError, match=r"model\.path: transformers does not know the model in .*strange"):
        build(AutoCausalLmConfig(path=str(strange)), device="cpu")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match=r"model\.path: .*"):
        build(AutoCausalLmConfig(path=str(tmp_path / "empty")), device="cpu")


def test_logits_that_are_no_multiple_of_the_projection_are_refused(tmp_path: Path) -> None:
    """Gemma 2 squeezes its logits through a tanh."""
    path = write(tmp_path / "gemma2", "Gemma2", head_dim=32, final_logit_softcapping=1.0)
    with pytest.raises(RecipeError, match=r"'Gemma2ForCausalLM' computes logits that differ by .* factor alone"):
        build(AutoCausalLmConfig(path=str(path)), device="cpu")


def test_a_family_that_was_not_compared_is_built_whole_or_not_at_all(tmp_path: Path) -> None:
    path = write(tmp_path / "olmo3", "Olmo3")
    assert build(AutoCausalLmConfig(path=str(path)), device="cpu").packs is False
    with pytest.raises(RecipeError, match=r"'Olmo3ForCausalLM' was not compared with transformers .*Train it on one"):
        build(AutoCausalLmConfig(path=str(path)), device="cpu", lazy=True)


def test_attention_that_transformers_does_not_have_for_a_model_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "gpt-oss", "GptOss", num_local_experts=4, head_dim=32, layer_types=["full_attention"] * 2)
    with pytest.raises(
        RecipeError, match=r"model\.attention: got 'sdpa', which GptOssForCausalLM .*'auto' or .*'eager'"
    ):
        build(AutoCausalLmConfig(path=str(path), attention="sdpa"), device="cpu")
    assert build(AutoCausalLmConfig(path=str(path)), device="cpu").attention == "eager"


def named(folder: Path, to: Path, **tokens: str) -> Path:
    """A copy whose tokenizer has further tokens, past the embedding."""
    shutil.copytree(folder, to)
    settings = json.loads((to / "tokenizer_config.json").read_text())
    (to / "tokenizer_config.json").write_text(json.dumps({**settings, **tokens}))
    return to


def test_a_tokenizer_larger_than_the_embedding_is_refused_also_where_config_json_does_not_give_the_size(
    tmp_path: Path,
) -> None:
    rows = LlamaConfig().vocab_size
    words = byte_tokenizer(tiny.SPECIAL, words=[f"word{number}" for number in range(rows)])
    config = LlamaConfig(**COMMON, eos_token_id=words.eos_token_id)
    save_random(tmp_path, LlamaForCausalLM, config, words, seed=0)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings.pop("vocab_size") == rows
    (tmp_path / "config.json").write_text(json.dumps(settings))
    unread = AutoCausalLmConfig(path=str(tmp_path))
    assert not list(unread.problems(None, None))
    last = f"'word{rows - 1}' with id {len(words) - 1} and {len(words) - 1 - rows} more, expected ids below {rows},"
    with pytest.raises(RecipeError, match=rf"^model\.path: the tokenizer in .* has the token {last}"):
        build(unread, device="cpu")


def test_weights_that_are_not_finite_are_not_taken_for_another_architecture(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    path = named(folder("Llama"), tmp_path / "broken")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    layer = r"first at layer 'model\.layers\.1\.mlp\.up_proj' \(Linear\): the weight 'model\..*' is not finite"
    with pytest.raises(RecipeError, match=rf"^model\.path: logits of '.*' are not finite, {layer}"):
        build(AutoCausalLmConfig(path=str(path)), device="cpu")


def test_a_text_with_a_token_that_has_no_embedding_is_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """A checkpoint of texts may keep the image token of its family."""
    path = named(folder("Llama"), tmp_path / "kept", image_token="<image>")
    model = build(AutoCausalLmConfig(path=str(path)), device="cpu")
    rows = model.trainable.get_input_embeddings().num_embeddings
    says = rf"'<image>' with id {rows}, expected ids below {rows}, the rows of the model's embedding\. Leave it out"
    with pytest.raises(DataError, match=rf"^data: prompt 'a <image>' has the token {says}"):
        model.prompt_tokens(Inputs.of_texts(["a", "a <image>"]), sampling=TextSamplingConfig(chat=False))
    with pytest.raises(DataError, match=rf"^stored completion 'a <image>' has the token {says}"):
        model.completion_tokens(["a <image>"])


def test_a_model_that_keeps_no_cache_or_has_a_layer_before_its_logits_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "gpt", "OpenAIGPTLMHeadModel")
    with pytest.raises(RecipeError, match=r"'OpenAIGPTLMHeadModel' returns no 'past_key_values', the cache with which"):
        build(AutoCausalLmConfig(path=str(path)), device="cpu")
    path = write(tmp_path / "roberta", "Roberta", is_decoder=True)
    with pytest.raises(
        RecipeError, match=r"'RobertaForCausalLM' does more between its trunk .* such as one more layer"
    ):
        build(AutoCausalLmConfig(path=str(path)), device="cpu")


def test_files_that_do_not_fit_together_are_told_from_an_architecture_that_takes_no_batches(tmp_path: Path) -> None:
    """Latent attention has as many keys as heads."""
    path = write(tmp_path / "latent", "DeepseekV3", num_key_value_heads=2)
    with pytest.raises(RecipeError, match=r"'DeepseekV3ForCausalLM' of transformers does not run on a text with the"):
        build(AutoCausalLmConfig(path=str(path)), device="cpu")


@pytest.mark.parametrize(
    ("name", "targets", "says"),
    [
        (
            "GPT2LMHeadModel",
            [],
            r"got none, and the model has no default targets in GPT2LMHeadModel\. Adapters are",
        ),
        ("GPT2LMHeadModel", ["c_attn"], r"'c_attn' matches no linear layer of .*, but Conv1D\. .*backend\.trains=full"),
        (
            "Mamba",
            [],
            r"got none, .* in MambaForCausalLM\. List endings of its linear layers: dt_proj, in_proj, out_proj",
        ),
        ("Mamba", ["out_proj"], r"'out_proj' is incompatible with Mamba"),
    ],
    ids=["transposed by default", "transposed", "without attention", "read by fused kernels"],
)
def test_adapters_that_an_architecture_cannot_have_are_refused_with_what_to_do(
    name: str, targets: list[str], says: str, load: Callable[..., AutoCausalLm]
) -> None:
    module = load(name).trainable
    found = names_in(SPEC.lora_targets, module, may_be_empty=True)
    with pytest.raises(RecipeError, match=rf"^backend\.lora\.targets: .*{says}"):
        add_lora(module, LoraSettings(targets=targets), default_targets=found, seed=0, device=torch.device("cpu"))
