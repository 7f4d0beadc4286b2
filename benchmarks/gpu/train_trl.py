"""Rounds of TRL's GRPOTrainer on the random language model: the run `text` of `runs.py` in another framework.

    PYTHONPATH=benchmarks python benchmarks/gpu/train_trl.py FOLDER --out FILE [--tiny]

16 prompts x 8 completions of exactly 256 tokens, two updates, bf16 autocast over fp32 weights, no KL penalty. A round
is two optimizer steps of TRL, which generates every second one.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from digits import digits
from measure import DEVICE, FORWARD_FLOP, now, peaks_gib, throughput, write_measures
from transformers import AutoModelForCausalLM, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl_cases import trl_tokenizer

UPDATES, ROUNDS = 2, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    prompts, samples, tokens, micro = (2, 2, 8, 2) if options.tiny else (16, 8, 256, 8)
    splits = prompts * samples // UPDATES // micro
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=DEVICE == "cpu",
            bf16=DEVICE == "cuda",
            gradient_checkpointing=False,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=splits,
            steps_per_generation=UPDATES * splits,
            num_generations=samples,
            max_completion_length=tokens,
            temperature=1.0,
            loss_type="grpo",
            beta=0.0,
            learning_rate=1e-6,
            max_steps=UPDATES * ROUNDS,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
        )
        clock, reward = Clock(), cast("Any", digits)
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32, trust_remote_code=False),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list([sum_of(number) for number in range(4 * prompts)]),
            processing_class=trl_tokenizer(options.folder),
            callbacks=[clock],
        )
        clock.follow(trainer)
        trainer.train()
    rounds = clock.rounds()
    measures = throughput(
        rounds,
        rows=prompts * samples * tokens,
        flop=0 if options.tiny else FORWARD_FLOP["qwen3-1.7b"],
        generated=1,
        # A forward and a backward. With several micro-batches or updates TRL also computes the old log-probs.
        trained=3 + 1,
    )
    write_measures(options.out, {**measures, **peaks_gib()}, rounds=rounds, note=f"micro-batches of {micro}")


def sum_of(number: int) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"{number} + {number} ="}]}


class Clock(TrainerCallback):
    """Seconds of generation, and the ends of optimizer steps."""

    def __init__(self) -> None:
        self._generated: list[float] = [0.0]
        self._ends: list[float] = [now()]

    def follow(self, trainer: Any) -> None:
        """Time its generation; TRL has no hook around it."""
        inner = trainer._generate_and_score_completions

        def timed(inputs: Any) -> Any:
            began = now()
            result = inner(inputs)
            self._generated[-1] += now() - began
            return result

        trainer._generate_and_score_completions = timed

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._ends = [now()]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._ends.append(now())
        self._generated.append(0.0)

    def rounds(self) -> list[dict[str, float]]:
        result: list[dict[str, float]] = []
        for first in range(0, len(self._ends) - UPDATES, UPDATES):
            whole = self._ends[first + UPDATES] - self._ends[first]
            generated = sum(self._generated[first : first + UPDATES])
            result.append({"generate_s": generated, "train_s": whole - generated, "round_s": whole})
        return result


if __name__ == "__main__":
    main()
