"""A text training step: UniRL against TRL's GRPOTrainer, same checkpoint, prompts, lengths, loss and updates.

    python benchmarks/trl_step.py [--pairs 6] [--threads 1] [--only quickstart]

Both take the same prompts in the same order, sample equally many completions, recompute the old log-probs and take two
optimizer steps. TRL runs its own training loop, and a callback at the end of each of its steps runs one step of ours,
so that the two alternate in one process. Before timing, the first round verifies that both compute the same: greedy
completions token by token; then advantages, loss and gradient on TRL's rollout, with weights that have moved away from
those that sampled it. Prints minima and medians of CPU time over the pairs without the first, in total and by phase,
and the number of generated tokens.

Three sizes: the text quickstart; the same with completions that all reach the length limit, so that both generate
exactly as many tokens; and that with a random model of 5 M parameters, where arithmetic dominates.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_cases import CASES, Case, share_of_digits, trl_tokenizer, write_checkpoint
from unirl.core.data.prompts import PromptOrder, read_prompts
from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import Trackers
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.roles import ScoreInput, Scores
from unirl.core.specs.plan import Plan
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import Status, TextSegment, Track
from unirl.loop.build import build_parts
from unirl.loop.parts import Parts
from unirl.loop.requests import step_requests
from unirl.loop.step import run_step
from unirl.numerics.loss.reduction import reduce_terms, weight_totals
from unirl.numerics.tokens.rollout import generate_text
from unirl.numerics.train.track_replay import TrackReplay

UPDATES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="name of one size")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for case in CASES:
        if options.only in ("", case.name):
            with tempfile.TemporaryDirectory() as folder:
                compare(case, write_checkpoint(case, Path(folder)), pairs=options.pairs, threads=options.threads)


@dataclass
class Clock:
    """CPU seconds of one round, by phase."""

    laps: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.process_time()
        try:
            yield
        finally:
            self.laps[phase] += time.process_time() - begin

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            with self(phase):
                return call(*args, **kwargs)

        return inner


class Ours:
    """Steps of ours, of the recipe `quickstart-text`."""

    def __init__(self, case: Case, checkpoint: Path, *, threads: int) -> None:
        catalog = Catalog.discover()
        overrides = [
            f"model.path={checkpoint}",
            f"data.prompts_per_step={case.prompts}",
            f"data.samples_per_prompt={case.samples}",
            "data.shuffle=false",
            f"sampling.max_new_tokens={case.max_new_tokens}",
            f"run.threads={threads}",
            "run.media_every=0",
            "run.max_steps=100000",
            f"train.updates_per_step={UPDATES}",
            # TRL's: Bessel's correction, and no bound.
            "backend.weight_decay=0",
            "advantage.ddof=1",
            "advantage.clip=null",
            "advantage.constant_reward=skip",
            "~tracker.report",
        ]
        self.plan: Plan = compose("quickstart-text", overrides, catalog=catalog)
        self.parts: Parts = build_parts(self.plan, catalog=catalog)
        self.prompts = read_prompts(Path(self.plan.data.train))
        if not case.ends:
            self.parts = dataclasses.replace(self.parts, rewards={"math": DigitReward()})
        self._order = PromptOrder(len(self.prompts), case.prompts, seed=0, shuffle=False)
        self._clock, self._events = Clock(), EventStream()
        self.num_tokens = 0
        engine, backend = self.parts.only.engine, self.parts.only.backend
        self._generate = engine.generate
        engine.generate = self._clock.timed("generate", self._counted)
        backend.train = self._clock.timed("train", backend.train)

    @property
    def model(self) -> Any:
        return self.parts.only.model

    def _counted(self, request: Any) -> Any:
        track = self._generate(request)
        self.num_tokens += sum(track.text.lengths)
        return track

    def chosen(self, number: int) -> list[Any]:
        return [self.prompts[row] for row in self._order.step(number)]

    def step(self, number: int) -> dict[str, float]:
        """CPU seconds of one step, by phase."""
        self._clock.laps.clear()
        self.num_tokens, begin = 0, time.process_time()
        run_step(
            self.parts,
            self.plan,
            self.chosen(number),
            step=number,
            events=self._events,
            trackers=Trackers({}, self._events),
        )
        return _with_rest(self._clock.laps, time.process_time() - begin)


class DigitReward:
    def score(self, samples: ScoreInput) -> Scores:
        return Scores(
            values=torch.tensor([share_of_digits(text) for text in samples.of("text", reward="digits").texts])
        )

    def close(self) -> None: ...


class Theirs(TrainerCallback):
    """TRL's trainer on the same prompts. `between` is called at the end of each of its steps."""

    def __init__(self, case: Case, checkpoint: Path, prompts: list[Any], *, rounds: int, folder: Path) -> None:
        self._rows = case.prompts * case.samples
        config = GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=self._rows // UPDATES,
            gradient_accumulation_steps=1,
            steps_per_generation=UPDATES,
            num_generations=case.samples,
            max_completion_length=case.max_new_tokens,
            temperature=1.0,
            loss_type="grpo",
            epsilon=0.2,
            beta=0.0,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            shuffle_dataset=False,
            max_steps=rounds * UPDATES,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
        )
        rows = [
            {"prompt": [{"role": "user", "content": prompt.text}], "answer": prompt.metadata["answer"]}
            for prompt in prompts
        ]

        def answers_right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
            texts = [completion[0]["content"] for completion in completions]
            result = [text.rpartition("</think>")[2].strip() for text in texts]
            return [float(text == right) for text, right in zip(result, answer, strict=True)]

        def digits(completions: list[Any], **_: Any) -> list[float]:
            return [share_of_digits(completion[0]["content"]) for completion in completions]

        self.clock = Clock()
        self.trainer: Any = GRPOTrainer(
            model=str(checkpoint),
            reward_funcs=answers_right if case.ends else digits,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=trl_tokenizer(checkpoint),
            callbacks=[self],
        )
        self.rollout: dict[str, Any] = {}
        self.rewards = torch.zeros(0)
        trainer = self.trainer
        trainer._generate_single_turn = self.clock.timed("generate", trainer._generate_single_turn)
        trainer._calculate_rewards = self._kept("rewards", self.clock.timed("score", trainer._calculate_rewards))
        trainer._generate_and_score_completions = self._kept("rollout", trainer._generate_and_score_completions)
        self.between: Callable[[int, dict[str, float]], None] = lambda number, seconds: None
        self._mark = 0.0

    @property
    def num_tokens(self) -> int:
        return int(self.rollout["completion_mask"].sum())

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._mark = time.process_time()

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step % UPDATES == 0:
            seconds = time.process_time() - self._mark
            laps = self.clock.laps
            laps["train"] = seconds - laps["generate"] - laps["score"]
            self.between(state.global_step // UPDATES - 1, _with_rest(laps, seconds))
            laps.clear()
            self._mark = time.process_time()

    def _kept(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            setattr(self, name, result)
            return result

        return inner


def _with_rest(laps: dict[str, float], total: float) -> dict[str, float]:
    return {"total": total, "generate": laps["generate"], "train": laps["train"]}


def compare(case: Case, checkpoint: Path, *, pairs: int, threads: int) -> None:
    ours = Ours(case, checkpoint, threads=threads)
    theirs = Theirs(case, checkpoint, ours.prompts, rounds=pairs + 1, folder=checkpoint)
    result: dict[str, list[dict[str, float]]] = {"ours": [], "trl": []}
    tokens: dict[str, int] = {"ours": 0, "trl": 0}

    def between(number: int, seconds: dict[str, float]) -> None:
        if number == 0:
            prove_equal(case, ours, theirs)
            ours.step(0)
            return
        result["trl"].append(seconds)
        tokens["trl"] += theirs.num_tokens
        result["ours"].append(ours.step(number))
        tokens["ours"] += ours.num_tokens
        print(f"  pair {number}: {result['trl'][-1]['total']:.2f} s, {result['ours'][-1]['total']:.2f} s", flush=True)
        if not case.ends:
            assert ours.num_tokens == theirs.num_tokens == case.prompts * case.samples * case.max_new_tokens

    theirs.between = between
    theirs.trainer.train()
    weights = sum(parameter.numel() for parameter in ours.model.trainable.parameters())
    size = f"{weights / 1e6:.2f} M weights, {case.prompts} x {case.samples} texts"
    print(f"\n{case.name}: {size}, {pairs} pairs, CPU seconds")
    print(f"  {'':10} {'TRL':>15} {'UniRL':>15} {'UniRL / TRL':>15}")
    for phase in ("total", "generate", "train"):
        columns = {who: [row[phase] for row in rows] for who, rows in result.items()}
        least, middle = ({who: of(rows) for who, rows in columns.items()} for of in (min, statistics.median))
        cells = [f"{least[who]:7.3f}, {middle[who]:6.3f}" for who in ("trl", "ours")]
        ratios = [each["ours"] / each["trl"] for each in (least, middle)]
        print(f"  {phase:10} {cells[0]:>15} {cells[1]:>15} {ratios[0]:7.2f}, {ratios[1]:6.2f}")
    print(f"  {'tokens':10} {tokens['trl'] // pairs:15} {tokens['ours'] // pairs:15}   a step", flush=True)
    ours.parts.only.backend.close()


def prove_equal(case: Case, ours: Ours, theirs: Theirs) -> None:
    """Raise unless both compute the same from the same inputs, with TRL's current weights."""
    model, trainer = ours.model, theirs.trainer
    live, moved = model.trainable, trainer.accelerator.unwrap_model(trainer.model)
    kept = {name: value.clone() for name, value in live.state_dict().items()}
    live.load_state_dict(moved.state_dict())
    greedy_tokens_agree(case, ours, theirs)

    rollout = theirs.rollout
    track = track_of(rollout, theirs.rewards[:, 0], case)
    track, _ = ours.parts.only.algorithm.advantages(track)
    assert track.advantages is not None
    _close("advantages", track.advantages, rollout["advantages"])

    replay = TrackReplay(model, stacked=True, policy_context=lambda _: None)  # type: ignore[arg-type,return-value]
    losses = ours.parts.only.algorithm.loss(track, replay, progress=0.0)
    terms: Any = losses.terms
    loss = reduce_terms(terms, totals=weight_totals(terms))
    loss.backward()
    # One micro-batch of all rows, like ours.
    trainer.current_gradient_accumulation_steps = 1
    other = trainer._compute_loss(trainer.model, rollout)
    other.backward()
    _close("loss", loss.detach(), other.detach())
    assert abs(float(loss.detach())) > 1e-4, "weights that moved give a loss that is not 0"
    gradients = {name: value.grad for name, value in moved.named_parameters()}
    norm = torch.stack([grad.norm() for grad in gradients.values()]).norm()
    apart = torch.stack([(value.grad - gradients[name]).norm() for name, value in live.named_parameters()]).norm()
    # Of fp32 sums over some thousand tokens.
    assert float(apart / norm) < 1e-4, f"gradients differ by {float(apart / norm):.1e} of their norm"
    gap = abs(float((loss - other).detach()))
    print(
        f"{case.name}: same greedy texts; loss {float(other.detach()):.6f}, ours differs by {gap:.1e}; "
        f"gradients differ by {float(apart / norm):.1e} of their norm"
    )
    for module in (live, moved):
        module.zero_grad(set_to_none=True)
    live.load_state_dict(kept)


def greedy_tokens_agree(case: Case, ours: Ours, theirs: Theirs) -> None:
    request = step_requests(ours.parts, ours.plan, ours.chosen(0), step=0)["text"].text
    rows = list(range(0, request.num_rows, case.samples))
    expected = dataclasses.replace(
        request.select(rows), sampling=dataclasses.replace(request.sampling, temperature=0.0)
    )
    tokens = generate_text(ours.model, expected).tokens
    moved = theirs.trainer.accelerator.unwrap_model(theirs.trainer.model)
    for prompt, result in zip(expected.prompt_tokens, tokens, strict=True):
        with torch.no_grad():
            whole = moved.generate(
                input_ids=prompt[None],
                attention_mask=torch.ones_like(prompt[None]),
                max_new_tokens=case.max_new_tokens,
                do_sample=False,
            )
        assert whole[0, len(prompt) :].tolist() == result.tolist(), "greedy texts differ"
    first = theirs.rollout["prompt_ids"][:: case.samples]
    masks = theirs.rollout["prompt_mask"][:: case.samples].bool()
    for row, mask, prompt in zip(first, masks, expected.prompt_tokens, strict=True):
        assert row[mask].tolist() == prompt.tolist(), "prompts differ"


def track_of(rollout: dict[str, Any], rewards: Tensor, case: Case) -> Track:
    """TRL's rollout as a track of ours."""

    def ragged(values: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return tuple(row[kept.bool()] for row, kept in zip(values, mask, strict=True))

    size = len(rewards)
    groups = tuple(f"group-{row // case.samples}" for row in range(size))
    return Track(
        name="text",
        sample_ids=tuple(str(row) for row in range(size)),
        group_ids=groups,
        parent_ids=groups,
        inputs=Inputs.of_texts(("",) * size),
        metadata=({},) * size,
        segment=TextSegment(
            prompt_tokens=ragged(rollout["prompt_ids"], rollout["prompt_mask"]),
            tokens=ragged(rollout["completion_ids"], rollout["completion_mask"]),
            log_probs=ragged(rollout["old_per_token_logps"], rollout["completion_mask"]),
        ),
        rewards=rewards.float(),
        reward_parts={"math": rewards.float()},
        sample_weights=torch.ones(size),
        status=(Status.COMPLETED,) * size,
        policy_version=(0,) * size,
    )


def _close(what: str, left: Tensor, right: Tensor) -> None:
    apart = float((left - right).abs().max())
    assert apart < 1e-5, f"{what} differ by {apart:.1e}"


if __name__ == "__main__":
    main()
