"""The reward model, against plain forwards of transformers and its own pipeline, row by row."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
    pipeline,
)
from unirl.core.errors import RecipeError, RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.rewards.text.config import RewardModelConfig
from unirl.rewards.text.reward_model import build
from unirl.rewards.text.tiny import tokenizer, write

PROMPTS = ("What is 6 x 7?", "Why?", "Say something long, please.", "Ünïcode?")
TEXTS = ("42", "Because.", "word " * 40, "\U0001f600 <|im_end|> \x00")
# fp32 sums of two layers in another batch shape.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = tmp_path_factory.mktemp("model")
    write(result, seed=3)
    return result


def samples(prompts: tuple[str, ...] = PROMPTS, texts: tuple[str, ...] = TEXTS) -> ScoreInput:
    names = tuple(f"s{row}" for row in range(len(texts)))
    return ScoreInput(
        sample_ids=names,
        group_ids=names,
        inputs=Inputs.of_texts(prompts),
        metadata=({},) * len(texts),
        media=Media(kind="text", values=texts),
    )


def score(folder: Path, batch: ScoreInput | None = None, **settings: Any) -> Scores:
    config = RewardModelConfig(**{"path": str(folder), "max_length": 512, **settings})
    return build(config, device="cpu").score(batch or samples())


def chat(prompt: str, text: str) -> str:
    """The template of the miniature, written out."""
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>\n"


def plainly(folder: Path, whole: str) -> float:
    """One row, unpadded."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokens: Any = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return float(model(**tokens(whole, return_tensors="pt")).logits[0, 0])


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_scores_are_those_of_plain_forwards_row_by_row(folder: Path, batch_size: int) -> None:
    expected = [plainly(folder, chat(*pair)) for pair in zip(PROMPTS, TEXTS, strict=True)]
    scores = score(folder, batch_size=batch_size)
    assert scores.values.tolist() == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING)
    assert scores.values.std() > 0.1
    assert scores.parts["truncated"].tolist() == [0] * 4


def test_scores_are_those_of_the_pipeline(folder: Path) -> None:
    classify: Any = pipeline("text-classification", model=str(folder), device="cpu", dtype=torch.float32)
    rows = [chat(*pair) for pair in zip(PROMPTS, TEXTS, strict=True)]
    expected = [classify([row], function_to_apply="none")[0]["score"] for row in rows]
    assert score(folder).values.tolist() == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING)


def test_a_label_names_one_of_several_outputs(tmp_path: Path) -> None:
    write(tmp_path, seed=3, num_labels=3)
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens: Any = AutoTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        logits = model(**tokens(chat(PROMPTS[0], TEXTS[0]), return_tensors="pt")).logits[0]
    for label in range(3):
        assert float(score(tmp_path, label=label).values[0]) == pytest.approx(float(logits[label]), abs=ROUNDING)
    for settings in ({}, {"label": 3}):
        with pytest.raises(RecipeError, match=r"reward\.reward-model\.label: got .*LABEL_2"):
            score(tmp_path, **settings)


def test_long_conversations_are_truncated_said_once_and_counted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    reward = build(RewardModelConfig(path=str(folder), max_length=100), device="cpu")
    with caplog.at_level(logging.WARNING):
        scores = [reward.score(samples()) for _ in range(2)]
    assert [record.getMessage().count("truncated to 100") for record in caplog.records] == [1]
    whole = chat(PROMPTS[2], TEXTS[2])
    # A token is a byte or a special token; the end of the text has no more than one special token in its 100.
    tokens = AutoTokenizer.from_pretrained(folder)(whole)["input_ids"]
    assert len(tokens) > 100
    assert all(one.parts["truncated"].tolist() == [0, 0, 1, 0] for one in scores)
    for keep, cut in (("end", tokens[-100:]), ("start", tokens[:100])):
        model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            expected = float(model(input_ids=torch.tensor([cut])).logits[0, 0])
        assert float(score(folder, max_length=100, keep=keep).values[2]) == pytest.approx(expected, abs=ROUNDING)


def test_a_system_message_is_part_of_the_conversation(folder: Path) -> None:
    expected = plainly(folder, f"<|im_start|>system\nBe brief.<|im_end|>\n{chat(PROMPTS[0], TEXTS[0])}")
    assert float(score(folder, system="Be brief.").values[0]) == pytest.approx(expected, abs=ROUNDING)


def test_an_encoder_takes_pairs_of_texts_with_their_types(tmp_path: Path) -> None:
    """BERT: [CLS] prompt [SEP] completion [SEP], types 0 and 1."""
    bare = tokenizer(chat_template=None)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokens: Any = PreTrainedTokenizerFast(
        tokenizer_object=bare.backend_tokenizer, pad_token=bare.pad_token, model_input_names=names
    )
    cls, sep = tokens.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    tokens._tokenizer.post_processor = processors.BertProcessing(("<|im_end|>", sep), ("<|im_start|>", cls))
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=256,
        pad_token_id=tokens.pad_token_id,
    )
    config.num_labels = 1
    torch.manual_seed(0)
    model: Any = BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(tmp_path)
    tokens.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = [
            float(model(**tokens(*pair, return_tensors="pt")).logits[0, 0]) for pair in zip(PROMPTS, TEXTS, strict=True)
        ]
    scores = score(tmp_path, template="plain", max_length=256)
    assert scores.values.tolist() == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING)
    # Cut to 64 tokens, of the longer text first, with the special tokens kept.
    for keep, side in (("start", "right"), ("end", "left")):
        tokens.truncation_side = side
        cut: Any = tokens(PROMPTS[2], TEXTS[2], truncation=True, max_length=64, return_tensors="pt")
        with torch.no_grad():
            short = float(model(**cut).logits[0, 0])
        scores = score(tmp_path, template="plain", max_length=64, keep=keep)
        assert float(scores.values[2]) == pytest.approx(short, abs=ROUNDING)
        assert scores.parts["truncated"].tolist() == [0, 0, 1, 0]
    with pytest.raises(RecipeError, match="has no chat template"):
        score(tmp_path, max_length=256)


def test_a_model_without_a_padding_token_scores_one_row_at_a_time(folder: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    model.config.pad_token_id = None
    tokens: Any = AutoTokenizer.from_pretrained(folder)
    tokens.pad_token = None
    model.save_pretrained(tmp_path)
    tokens.save_pretrained(tmp_path)
    assert score(tmp_path).values.tolist() == pytest.approx(score(folder).values.tolist(), abs=ROUNDING)


def test_bfloat16_is_near(folder: Path) -> None:
    exact, near = score(folder).values, score(folder, dtype="bfloat16").values
    # 8 bits a number through two layers and their norms.
    assert float((exact - near).abs().max()) < 0.1 * float(exact.abs().max())


def test_checkpoints_of_something_else_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"reward\.reward-model\.path: got nothing"):
        build(RewardModelConfig(), device="cpu")
    with pytest.raises(RecipeError, match="there is no folder"):
        score(tmp_path / "missing")
    with pytest.raises(RecipeError, match="does not load"):
        score(tmp_path)
    whole: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    config = whole.config
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "causal")
    with pytest.raises(RecipeError, match="checkpoint of Qwen3ForCausalLM"):
        score(tmp_path / "causal")
    weights = {name: value for name, value in whole.state_dict().items() if "score" not in name}
    whole.save_pretrained(tmp_path / "headless", state_dict=weights)
    tokenizer().save_pretrained(tmp_path / "headless")
    with pytest.raises(RecipeError, match=r"lack 'score\.weight'"):
        score(tmp_path / "headless")
    with pytest.raises(RecipeError, match=r"max_length: got 513, expected at most the model's 512"):
        score(folder, max_length=513)
    with pytest.raises(RecipeError, match=r"reward-model\.system"):
        score(folder, template="plain", system="Be brief.")


def test_scores_that_are_not_finite_are_refused(folder: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    model.score.weight.data.fill_(torch.inf)
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RewardFailed, match="expected a finite number"):
        score(tmp_path)


def test_a_template_that_fails_names_the_sample(folder: Path, tmp_path: Path) -> None:
    write(tmp_path, seed=3)
    tokenizer(chat_template="{{ raise_exception('no assistant') }}").save_pretrained(tmp_path)
    with pytest.raises(RewardFailed, match=r"fails on sample 's0': no assistant"):
        score(tmp_path)


def test_a_closed_reward_scores_no_more(folder: Path) -> None:
    reward = build(RewardModelConfig(path=str(folder), max_length=512), device="cpu")
    reward.close()
    reward.close()
    with pytest.raises(RewardFailed, match="close"):
        reward.score(samples())


def test_halves_of_characters_are_joined_or_replaced(folder: Path) -> None:
    """A detokenizer may leave surrogates; no tokenizer takes them."""
    broken = samples(PROMPTS[:2], ("\ud83d\ude00 yes", "\ude00 no"))
    whole = samples(PROMPTS[:2], ("\U0001f600 yes", "\ufffd no"))
    assert score(folder, broken).values.tolist() == score(folder, whole).values.tolist()


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    write(tmp_path, seed=3)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token": "[PAD]"}))
    with pytest.raises(RecipeError, match=r"^reward\.reward-model\.path: the tokenizer in .* has the token '\[PAD\]'"):
        score(tmp_path)


def test_a_quantized_checkpoint_names_the_package_that_it_needs(tmp_path: Path) -> None:
    write(tmp_path, seed=3)
    file = tmp_path / "config.json"
    method = {"quant_method": "awq", "bits": 4}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": method}))
    with pytest.raises(RecipeError, match=r"^reward\.reward-model\.path: the checkpoint in .* needs a package: .*\w"):
        score(tmp_path)
