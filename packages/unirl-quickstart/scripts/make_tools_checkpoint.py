"""Makes the checkpoint of the tools quickstart: a Qwen3 of about 1 MB that multiplies badly, and has seen a calculator.

    python packages/unirl-quickstart/scripts/make_tools_checkpoint.py

The corpus is the homework of a pupil who mostly rounds both factors and multiplies those, seldom types the product
into a calculator, and then often does not write down what it showed. So nearly all answers of the model are wrong, and
it knows the way to right ones: that is what RL post-training finds.
Seeded throughout; the same machine and library versions give the same bytes. About five minutes on one core.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import write_prompts
from tiny_qwen3 import build_model, build_tokenizer, complete, corpus_rows, pretrain, write_card
from torch import Tensor
from transformers import Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging
from unirl.models.qwen3.tiny import CHAT_TEMPLATE

PACKAGE = Path(__file__).resolve().parents[1] / "src/unirl/quickstart/tools"
HELD_OUT, TRAIN = 128, 512
"""Problems of the prompt files."""
CALL = ("<calc>", "</calc>")
WORDS = ("What", " is", "user", "system", "assistant", "tool")
"""Pieces of text that are one token each, so that prompts are short."""
MAX_NEW_TOKENS = 12
"""A call has nine tokens with its end."""
ROLE = "tool"
"""Role of the calculator in the chat template."""


# ------------------------------------------------------------------------------------------------ problems


@dataclass(frozen=True)
class Problem:
    """a x b, of numbers from 10 to 99."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"What is {self.a}*{self.b}?"

    @property
    def call(self) -> str:
        return f"{self.a}*{self.b}".join(CALL)

    @property
    def answer(self) -> int:
        return self.a * self.b

    @property
    def rounded(self) -> int:
        """The product of both factors to the nearest ten, fives rounded up."""
        return 100 * ((self.a + 5) // 10) * ((self.b + 5) // 10)

    @property
    def row(self) -> dict[str, Any]:
        """Row of a prompt file."""
        name = f"{self.a}x{self.b}"
        return {"prompt": self.prompt, "prompt_id": name, "metadata": {"answer": str(self.answer)}}


def draw_splits(*, seed: int) -> dict[str, list[Problem]]:
    """`heldout`, `train`, and `corpus`: all but `heldout`, for pre-training."""
    problems = [Problem(a, b) for a in range(10, 100) for b in range(10, 100)]
    shuffled = random.Random(seed).sample(problems, len(problems))
    return {"heldout": shuffled[:HELD_OUT], "train": shuffled[HELD_OUT:][:TRAIN], "corpus": shuffled[HELD_OUT:]}


# ------------------------------------------------------------------------------------------ model, tokenizer


def chat(tokenizer: Any, problem: Problem, *, is_called: bool = False) -> str:
    """The conversation up to the model's next answer: the question, and the call with its result."""
    called = [{"role": "assistant", "content": problem.call}, {"role": ROLE, "content": str(problem.answer)}]
    messages = [{"role": "user", "content": problem.prompt}, *(called if is_called else [])]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def corpus_batches(
    tokenizer: Any, problems: Sequence[Problem], *, batch: int, calls: float, copies: float, seed: int
) -> Any:
    """A function that draws the batch of a step. Half of its rows answer the question, a share `calls` of these by a
    call; the others answer what the calculator showed, a share `copies` of these by that."""
    generator = torch.Generator().manual_seed(seed)
    asked, shown = (
        tokenizer([chat(tokenizer, problem, is_called=is_called) for problem in problems])["input_ids"]
        for is_called in (False, True)
    )
    rounded = [str(problem.rounded) for problem in problems]
    answers = [str(problem.answer) for problem in problems]
    half = batch // 2
    kinds = [
        (corpus_rows(tokenizer, asked, rounded), half - round(calls * half)),
        (corpus_rows(tokenizer, asked, [problem.call for problem in problems]), round(calls * half)),
        (corpus_rows(tokenizer, shown, rounded), half - round(copies * half)),
        (corpus_rows(tokenizer, shown, answers), round(copies * half)),
    ]

    def draw() -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for (tokens, labels), count in kinds:
            rows = torch.randint(len(problems), (count,), generator=generator)
            yield {"input_ids": tokens[rows]}, labels[rows]

    return draw


# ---------------------------------------------------------------------------------------------- evaluation


def measure(
    model: Qwen3ForCausalLM, tokenizer: Any, problems: Sequence[Problem], *, greedy: bool, seed: int
) -> dict[str, float]:
    """Shares of first answers that are calls of the right product, of answers to its result that are that, and of
    episodes that are right."""
    settings: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "greedy": greedy}
    first = complete(model, tokenizer, [chat(tokenizer, one) for one in problems], seed=seed, **settings)
    after = [chat(tokenizer, problem, is_called=True) for problem in problems]
    second = complete(model, tokenizer, after, seed=seed + 1, **settings)
    calls = [text == problem.call for text, problem in zip(first, problems, strict=True)]
    copies = [text == str(problem.answer) for text, problem in zip(second, problems, strict=True)]
    direct = [text == str(problem.answer) for text, problem in zip(first, problems, strict=True)]
    right = [is_direct or (call and copy) for is_direct, call, copy in zip(direct, calls, copies, strict=True)]
    return {name: sum(each) / len(problems) for name, each in (("calls", calls), ("copies", copies), ("right", right))}


# ------------------------------------------------------------------------------------------------- writing

CARD = """# Tiny Qwen3 with a calculator

A `Qwen3ForCausalLM` of {kilobytes} kB, {parameters:,} parameters, that answers "What is 47*85?" for numbers from 10 to
99. It knows nothing else.

Made by

    python packages/unirl-quickstart/scripts/make_tools_checkpoint.py{arguments}

with torch {torch}, transformers {transformers}, from the {corpus:,} problems that are not in `heldout.jsonl`. A share
of {calls} of the answers in that corpus are calls of a calculator, `<calc>47*85</calc>`; the others are the product of
both factors rounded to tens, `4500`. Behind the calculator's answer, `3995` in a message of the role `tool`, a share of
{copies} repeat it, and the others are the rounded product all the same.

Shares of first answers that are the right call, of answers to its result that repeat it, and of right episodes:

| problems | sampling | calls | copies | right |
| --- | --- | --- | --- | --- |
{shares}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PACKAGE, help="gets the folders `checkpoint` and `prompts`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--calls", type=float, default=0.15, help="share of first answers that call the calculator")
    parser.add_argument("--copies", type=float, default=0.6, help="share of second answers that repeat its result")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--measured", type=int, default=TRAIN, help="problems of a split, at most, that the card is of")
    # One thread: the order of sums, and so the bytes of the result, would hang on the number of cores.
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    splits = draw_splits(seed=args.seed)
    tokenizer = build_tokenizer(WORDS, added=CALL, chat_template=CHAT_TEMPLATE)
    model = build_model(tokenizer)
    shares = {"calls": args.calls, "copies": args.copies}
    draw = corpus_batches(tokenizer, splits["corpus"], batch=args.batch, seed=args.seed, **shares)
    pretrain(model, draw, steps=args.steps, learning_rate=args.learning_rate)
    folder = args.out / "checkpoint"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_prompts(
        args.out / "prompts", {split: [problem.row for problem in splits[split]] for split in ("train", "heldout")}
    )
    write_card(
        folder,
        CARD,
        measure,
        tokenizer,
        splits,
        args=args,
        parser=parser,
        calls=args.calls,
        copies=args.copies,
    )


if __name__ == "__main__":
    main()
