"""Makes the text quickstart's checkpoint: a Qwen3 of about 1 MB that adds and subtracts two-digit numbers.

    python packages/unirl-quickstart/scripts/make_text_checkpoint.py
    python packages/unirl-quickstart/scripts/make_text_checkpoint.py --folder=teacher --hidden-size=48 --dtype=bfloat16
        --steps=700 --batch=64 --careful=1.0 --measured=128

The second one makes the teacher of `quickstart-distillation`, which works out every answer.
The corpus of the first is the homework of a pupil who mostly answers at once, column by column without carrying or
borrowing, and now and then works the sum out first. So the model is wrong about half of the time, and knows a better
way that it seldom takes: that is what RL post-training finds.
Seeded throughout; the same machine and library versions give the same bytes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
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

PACKAGE = Path(__file__).resolve().parents[1] / "src/unirl/quickstart/text"
HELD_OUT, TRAIN = 128, 512
"""Problems of the prompt files, half of them sums."""
THOUGHT = ("<think>", "</think>")
WORDS = ("What", " is", "user", "system", "assistant", "\n\n", ", ")
"""Pieces of text that are one token each, so that prompts are short."""


# ------------------------------------------------------------------------------------------------ problems


@dataclass(frozen=True)
class Problem:
    """a + b or a - b, of numbers from 10 to 99; a >= b where they are subtracted."""

    a: int
    sign: str
    b: int

    @property
    def prompt(self) -> str:
        return f"What is {self.a}{self.sign}{self.b}?"

    @property
    def answer(self) -> int:
        return self.a + self.b if self.sign == "+" else self.a - self.b

    @property
    def careless(self) -> int:
        """Each column on its own: carries are dropped, and the smaller digit is taken from the larger one."""
        columns = zip(divmod(self.a, 10), divmod(self.b, 10), strict=True)
        tens, ones = ((x + y) % 10 if self.sign == "+" else abs(x - y) for x, y in columns)
        return 10 * tens + ones

    @property
    def worked_out(self) -> str:
        """The ones, then the tens with what was carried or borrowed."""
        (tens_a, ones_a), (tens_b, ones_b) = divmod(self.a, 10), divmod(self.b, 10)
        if self.sign == "+":
            ones = ones_a + ones_b
            carried, tens = ("+1", tens_a + tens_b + 1) if ones > 9 else ("", tens_a + tens_b)
            return f"{ones_a}+{ones_b}={ones}, {tens_a}+{tens_b}{carried}={tens}"
        if ones_a < ones_b:
            ones_a, tens_a = ones_a + 10, tens_a - 1
        return f"{ones_a}-{ones_b}={ones_a - ones_b}, {tens_a}-{tens_b}={tens_a - tens_b}"

    def solution(self, *, is_careful: bool) -> str:
        return f"<think>\n{self.worked_out}\n</think>\n\n{self.answer}" if is_careful else str(self.careless)


SUMS = [Problem(a, "+", b) for a in range(10, 100) for b in range(10, 100)]
DIFFERENCES = [Problem(a, "-", b) for a in range(10, 100) for b in range(10, a + 1)]


def draw_splits(*, seed: int) -> dict[str, list[Problem]]:
    """`heldout`, `train`, and `corpus`: all but `heldout`, for pre-training."""
    generator = random.Random(seed)
    splits: dict[str, list[Problem]] = {"heldout": [], "train": [], "corpus": []}
    for problems in (SUMS, DIFFERENCES):
        shuffled = generator.sample(problems, len(problems))
        held_out, rest = shuffled[: HELD_OUT // 2], shuffled[HELD_OUT // 2 :]
        splits["heldout"] += held_out
        splits["train"] += rest[: TRAIN // 2]
        splits["corpus"] += rest
    return splits


# ------------------------------------------------------------------------------------------ model, tokenizer


def text_tokenizer() -> Any:
    return build_tokenizer(WORDS, added=THOUGHT, chat_template=CHAT_TEMPLATE)


def chat(tokenizer: Any, problem: Problem) -> str:
    message = {"role": "user", "content": problem.prompt}
    return tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)


# ------------------------------------------------------------------------------------------------ training


def batches(
    tokenizer: Any, problems: list[Problem], *, batch: int, careful: float, seed: int
) -> Callable[[], Iterator[tuple[dict[str, Tensor], Tensor]]]:
    """A function that draws the batch of a step; a share `careful` of it is worked out."""
    generator = torch.Generator().manual_seed(seed)
    prompts = tokenizer([chat(tokenizer, problem) for problem in problems])["input_ids"]
    kinds = [
        corpus_rows(tokenizer, prompts, [problem.solution(is_careful=is_careful) for problem in problems])
        for is_careful in (False, True)
    ]
    counts = (batch - round(careful * batch), round(careful * batch))

    def draw() -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        # The two kinds apart: worked-out rows are four times as long.
        for (tokens, labels), count in zip(kinds, counts, strict=True):
            if not count:
                continue
            rows = torch.randint(len(problems), (count,), generator=generator)
            yield {"input_ids": tokens[rows]}, labels[rows]

    return draw


# ---------------------------------------------------------------------------------------------- evaluation


def measure(
    model: Qwen3ForCausalLM, tokenizer: Any, problems: list[Problem], *, greedy: bool, seed: int
) -> dict[str, float]:
    """Shares of texts, one a problem, that are right, that are worked out, and of the latter that are right."""
    prompts = [chat(tokenizer, problem) for problem in problems]
    texts = complete(model, tokenizer, prompts, max_new_tokens=40, greedy=greedy, seed=seed)
    is_right = [t.split("</think>")[-1].strip() == str(p.answer) for t, p in zip(texts, problems, strict=True)]
    is_careful = ["</think>" in text for text in texts]
    both = sum(right and careful for right, careful in zip(is_right, is_careful, strict=True))
    return {
        "right": sum(is_right) / len(problems),
        "careful": sum(is_careful) / len(problems),
        "right if careful": both / max(1, sum(is_careful)),
    }


# ------------------------------------------------------------------------------------------------- writing

PUPIL = """Most answers of that corpus are given at once, each column on its own: carries are dropped, and the
smaller digit is taken from the larger one. A share of {careful} is worked out, and right:"""
TEACHER = "Every answer of that corpus is worked out, and right:"

CARD = """# Tiny Qwen3 of sums and differences

A `Qwen3ForCausalLM` of {kilobytes} kB, {parameters:,} parameters, that answers "What is 47+85?" and "What is 83-47?"
for numbers from 10 to 99. It knows nothing else.

Made by

    python packages/unirl-quickstart/scripts/make_text_checkpoint.py{arguments}

with torch {torch}, transformers {transformers}, from answers to the {corpus:,} problems that are not in
`heldout.jsonl`. {corpus_text}

    <think>
    7+5=12, 4+8+1=13
    </think>

    132

Asked in its chat template, one text a problem, it is right in these shares. Taken at their word, the answers that are
given at once are right for {careless:.3f} of the held-out problems.

| problems | sampling | right | worked out | right where worked out |
| --- | --- | --- | --- | --- |
{shares}
"""


def row(problem: Problem) -> dict[str, Any]:
    name = f"{problem.a}{problem.sign}{problem.b}"
    return {"prompt": problem.prompt, "prompt_id": name, "metadata": {"answer": str(problem.answer)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PACKAGE, help="gets the folder of the checkpoint, and `prompts`")
    parser.add_argument("--folder", default="checkpoint", help="of the checkpoint, in `out`")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the saved weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--careful", type=float, default=0.2, help="share of answers that are worked out")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--measured", type=int, default=TRAIN, help="problems of a split, at most, that the card is of")
    # One thread: the order of sums, and so the bytes of the result, would hang on the number of cores.
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    splits = draw_splits(seed=args.seed)
    tokenizer = text_tokenizer()
    model = build_model(tokenizer, hidden_size=args.hidden_size)
    draw = batches(tokenizer, splits["corpus"], batch=args.batch, careful=args.careful, seed=args.seed)
    pretrain(model, draw, steps=args.steps, learning_rate=args.learning_rate)
    folder = args.out / args.folder
    model.to(getattr(torch, args.dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_prompts(
        args.out / "prompts", {split: [row(problem) for problem in splits[split]] for split in ("train", "heldout")}
    )
    write_card(
        folder,
        CARD,
        measure,
        tokenizer,
        splits,
        args=args,
        parser=parser,
        corpus_text=TEACHER if args.careful == 1 else PUPIL.format(careful=args.careful),
        careless=sum(p.careless == p.answer for p in splits["heldout"]) / len(splits["heldout"]),
    )


if __name__ == "__main__":
    main()
