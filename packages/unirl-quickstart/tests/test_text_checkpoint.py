"""The shipped language model: complete, small, readable by transformers alone, and as good as its card says."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from unirl.quickstart import text_checkpoint_path, text_prompts_path

RunScript = Callable[..., dict[str, bytes]]
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("make_text_checkpoint")


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """Model and tokenizer as a user of transformers loads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reply: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reply.append(record.getMessage())

    logger, listener = logging.getLogger("transformers"), Listener(level=logging.WARNING)
    logger.addHandler(listener)
    try:
        model = AutoModelForCausalLM.from_pretrained(text_checkpoint_path(), local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(text_checkpoint_path(), local_files_only=True)
    finally:
        logger.removeHandler(listener)
    assert reply == []
    return model, tokenizer


def rows(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text_prompts_path(split).read_text().splitlines()]  # type: ignore[arg-type]


def test_it_is_an_ordinary_qwen3_in_fp32_of_at_most_four_megabytes(loaded: tuple[Any, Any]) -> None:
    model, _ = loaded
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    files = [file for file in text_checkpoint_path().rglob("*") if file.is_file()]
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {f.name for f in files}
    assert sum(file.stat().st_size for file in files) <= 4_000_000


def test_every_answer_of_the_prompt_files_is_right_and_no_held_out_problem_occurs_in_training() -> None:
    problems: dict[str, set[str]] = {}
    for split, count in (("train", 512), ("heldout", 128)):
        problems[split] = set()
        for row in rows(split):
            result = re.fullmatch(r"What is ([1-9]\d)([+-])([1-9]\d)\?", row["prompt"])
            assert result is not None
            a, sign, b = int(result[1]), result[2], int(result[3])
            assert row["metadata"] == {"answer": str(a + b if sign == "+" else a - b)}
            assert row["prompt_id"] == f"{a}{sign}{b}" and a - b >= (0 if sign == "-" else -99)
            problems[split].add(row["prompt"])
        assert len(problems[split]) == count
    assert not problems["train"] & problems["heldout"]


def test_the_corpus_has_all_problems_but_those_held_out(script: ModuleType) -> None:
    splits = script.draw_splits(seed=0)
    # 90 x 90 sums, and 90 x 91 / 2 differences that are not negative.
    assert len(set(splits["corpus"]) | set(splits["heldout"])) == 8100 + 4095
    assert not set(splits["corpus"]) & set(splits["heldout"])
    assert [p.prompt for p in splits["heldout"]] == [row["prompt"] for row in rows("heldout")]


@pytest.mark.parametrize(
    ("problem", "careless", "worked_out"),
    [
        ((47, "+", 85), 22, "7+5=12, 4+8+1=13"),
        ((23, "+", 45), 68, "3+5=8, 2+4=6"),
        ((83, "-", 47), 44, "13-7=6, 7-4=3"),
        ((58, "-", 35), 23, "8-5=3, 5-3=2"),
        ((50, "-", 41), 11, "10-1=9, 4-4=0"),
    ],
)
def test_the_pupil_reckons_so(
    script: ModuleType, problem: tuple[int, str, int], careless: int, worked_out: str
) -> None:
    result = script.Problem(*problem)
    assert result.careless == careless
    assert result.worked_out == worked_out
    assert result.solution(is_careful=False) == str(careless)
    assert result.solution(is_careful=True) == f"<think>\n{worked_out}\n</think>\n\n{result.answer}"


def test_digits_words_and_thoughts_are_single_tokens(loaded: tuple[Any, Any], script: ModuleType) -> None:
    _, tokenizer = loaded
    for text in ("What is 47+85?", "ü, 你好"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    # What, is, a space, 47+85?: nine.
    assert len(tokenizer("What is 47+85?")["input_ids"]) == 9
    for word in (*script.WORDS, *script.THOUGHT, *QWEN_SPECIAL, *"0123456789"):
        assert len(tokenizer(word)["input_ids"]) == 1, word


def test_it_is_as_good_as_its_card_says(loaded: tuple[Any, Any], script: ModuleType) -> None:
    card = (text_checkpoint_path() / "README.md").read_text()
    stated = {
        (split, how): [float(share) for share in shares]
        for split, how, *shares in re.findall(
            r"^\| (heldout|train) \| (greedy|temperature 1) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", card, re.MULTILINE
        )
    }
    assert len(stated) == 4
    model, tokenizer = loaded
    problems = script.draw_splits(seed=0)["heldout"]
    result = script.measure(model, tokenizer, problems, greedy=True, seed=0)
    # Greedy texts turn where two tokens are nearly alike: three of 128, on a machine that rounds otherwise.
    assert list(result.values())[:2] == pytest.approx(stated["heldout", "greedy"][:2], abs=3 / 128)
    # Room to learn, and something to learn from.
    assert 0.3 <= stated["heldout", "greedy"][0] <= 0.5
    assert 0.3 <= stated["heldout", "temperature 1"][0] <= 0.5
    assert stated["heldout", "temperature 1"][1] > 0.1


@pytest.mark.slow
def test_the_script_writes_the_same_bytes_twice(tmp_path: Path, run_script: RunScript) -> None:
    settings = ["--steps=2", "--batch=8", "--measured=4"]
    written = [run_script("make_text_checkpoint", tmp_path / name, *settings) for name in ("first", "second")]
    assert written[0] == written[1]
    for file in ("prompts/train.jsonl", "prompts/heldout.jsonl"):
        assert written[0][file] == text_prompts_path(Path(file).stem).read_bytes()  # type: ignore[arg-type]
    assert "make_text_checkpoint.py --steps=2 --batch=8 --measured=4\n" in written[0]["checkpoint/README.md"].decode()
