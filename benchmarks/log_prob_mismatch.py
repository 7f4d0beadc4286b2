"""Log-probs of an engine, of the trainer, and of the same weights in fp64, compared step by step.

    python benchmarks/log_prob_mismatch.py [--engine vllm] [--steps 10] [--seed 0]

Trains the text quickstart. After each rollout, before its updates, every sampled token is scored three times with the
same weights: by the engine while sampling, by the trainer in fp32, and by transformers' forward in fp64, the reference
for the other two. Also measures the conditioning of the checkpoint: the fp64 forward again, with each weight perturbed
at random by about the rounding error of fp32.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM
from unirl.core.data.prompts import PromptOrder, read_prompts
from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import Trackers
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.types.event import Event
from unirl.core.types.track import TextSegment
from unirl.loop.build import build_parts
from unirl.loop.step import run_step
from unirl.numerics.tokens.batches import from_rows, pad_batch
from unirl.numerics.tokens.replay import replay_text

ROUNDING = 2.0**-25
"""Typical relative rounding error of fp32; the maximum is 2^-24."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    catalog = Catalog.discover()
    overrides = [f"engine={options.engine}", f"run.seed={options.seed}", "run.media_every=0", "~tracker.report"]
    plan = compose("quickstart-text", overrides, catalog=catalog)
    parts = build_parts(plan, catalog=catalog)
    events = EventStream()
    steps: list[Event] = []
    events.listen(lambda event: steps.append(event) if event.kind == "step" else None)
    rows = read_prompts(Path(plan.data.train))
    order = PromptOrder(len(rows), plan.data.prompts_per_step, seed=plan.run.seed, shuffle=plan.data.shuffle)
    segments: list[TextSegment] = []
    generate = parts.only.engine.generate

    def kept(request: Any) -> Any:
        track = generate(request)
        segments.append(track.text)
        return track

    parts.only.engine.generate = kept
    pairs = ("engine, replay", "engine, fp64", "replay, fp64", "weights rounded")
    print(f"{'step':>4} {'reward':>7} {'tokens':>7} " + " ".join(f"{pair + ': max, mean':>26}" for pair in pairs))
    try:
        for step in range(options.steps):
            model: Any = copy.deepcopy(parts.only.model)
            prompts = [rows[row] for row in order.step(step)]
            run_step(parts, plan, prompts, step=step, events=events, trackers=Trackers({}, events))
            segment = segments.pop()
            engine = torch.cat(list(segment.log_probs or ())).double()
            with torch.no_grad():
                replayed = replay_text(model, segment, packing=True, with_entropy=False)
            replay = from_rows(replayed.log_probs, replayed.valid).double()
            exact = in_fp64(model, segment)
            moved = in_fp64(model, segment, moved_by=ROUNDING)
            gaps = [engine - replay, engine - exact, replay - exact, moved - exact]
            cells = [f"{float(gap.abs().max()):13.1e} {float(gap.abs().mean()):12.1e}" for gap in gaps]
            reward = steps[-1].data["metrics"]["reward_mean"]
            print(
                f"{step + 1:4} {reward:7.3f} {len(engine):7} " + " ".join(f"{cell:>26}" for cell in cells), flush=True
            )
    finally:
        parts.only.engine.close()
        parts.only.backend.close()


@torch.no_grad()
def in_fp64(model: Any, segment: TextSegment, *, moved_by: float = 0.0) -> Tensor:
    """[T] log-probs of the sampled tokens; each weight is multiplied by 1 + moved_by z, z standard normal."""
    causal_lm = copy.deepcopy(model.trainable).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in causal_lm.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.mul_(1 + moved_by * noise)
    batch = pad_batch(segment.prompt_tokens, segment.tokens, pad_token=model.pad_token)
    logits = Qwen3ForCausalLM.forward(
        causal_lm,
        input_ids=batch.tokens,
        attention_mask=batch.attention_mask,
        position_ids=batch.positions,
        use_cache=False,
    ).logits
    scores = torch.log_softmax(logits.flatten(0, 1)[batch.target_index] / segment.temperature, dim=1)
    return scores.gather(1, batch.targets[:, None]).squeeze(1)


if __name__ == "__main__":
    main()
