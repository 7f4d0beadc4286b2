"""The shipped model with a calculator: complete, small, readable by transformers alone, and as good as its card says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from unirl.quickstart import tools_checkpoint_path, tools_prompts_path

RunScript = Callable[..., dict[str, bytes]]


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("make_tools_checkpoint")


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tools_checkpoint_path()
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def rows(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in tools_prompts_path(split).read_text().splitlines()]  # type: ignore[arg-type]


def test_it_is_an_ordinary_qwen3_in_fp32_of_at_most_a_megabyte(loaded: tuple[Any, Any]) -> None:
    model, _ = loaded
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert sum(file.stat().st_size for file in tools_checkpoint_path().rglob("*") if file.is_file()) <= 1_000_000


def test_prompts_are_products_with_their_answers_and_no_held_out_one_is_trained_on() -> None:
    prompts = {split: {row["prompt"] for row in rows(split)} for split in ("train", "heldout")}
    assert (len(prompts["train"]), len(prompts["heldout"])) == (512, 128)
    assert not prompts["train"] & prompts["heldout"]
    for row in (*rows("train"), *rows("heldout")):
        a, b = re.findall(r"\d+", row["prompt"])
        assert row["metadata"] == {"answer": str(int(a) * int(b))}


def test_the_pupil_rounds_or_calls(script: ModuleType) -> None:
    problem = script.Problem(47, 85)
    assert (problem.prompt, problem.call, problem.answer) == ("What is 47*85?", "<calc>47*85</calc>", 3995)
    # 50 x 90, and fives go up.
    assert problem.rounded == 4500 and script.Problem(14, 15).rounded == 200


def test_it_is_as_good_as_its_card_says(loaded: tuple[Any, Any], script: ModuleType) -> None:
    card = (tools_checkpoint_path() / "README.md").read_text()
    stated = {
        (split, how): [float(share) for share in shares]
        for split, how, *shares in re.findall(
            r"^\| (heldout|train) \| (greedy|temperature 1) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", card, re.MULTILINE
        )
    }
    assert len(stated) == 4
    model, tokenizer = loaded
    result = script.measure(model, tokenizer, script.draw_splits(seed=0)["heldout"], greedy=True, seed=0)
    # Greedy texts turn where two tokens are nearly alike: three of 128, on a machine that rounds otherwise.
    assert list(result.values()) == pytest.approx(stated["heldout", "greedy"], abs=3 / 128)
    # Room to learn, and something to learn from: calls that are seldom, and results that are not always copied.
    calls, copies, right = stated["heldout", "temperature 1"]
    assert 0.1 <= calls <= 0.2 and 0.5 <= copies <= 0.7 and right < 0.15


@pytest.mark.slow
def test_the_script_writes_the_same_bytes_twice(tmp_path: Path, run_script: RunScript) -> None:
    settings = ["--steps=2", "--batch=8", "--measured=4"]
    written = [run_script("make_tools_checkpoint", tmp_path / name, *settings) for name in ("first", "second")]
    assert written[0] == written[1]
    for file in ("prompts/train.jsonl", "prompts/heldout.jsonl"):
        assert written[0][file] == tools_prompts_path(Path(file).stem).read_bytes()  # type: ignore[arg-type]
