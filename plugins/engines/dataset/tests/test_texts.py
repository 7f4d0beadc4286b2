"""Stored completions as samples: their tokens are the model's own, and losses on them are those of transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from unirl.core.data.prompts import read_prompts
from unirl.core.data.run_data import read_data
from unirl.core.errors import DataError
from unirl.core.match.match import match
from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import Trackers
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.part_config import RewardConfig
from unirl.core.specs.plan import Plan
from unirl.core.types.event import Event
from unirl.core.types.rollout import verify_echo
from unirl.core.types.sampling import TextSamplingConfig
from unirl.core.types.track import Status, Track
from unirl.engines.dataset.config import DatasetConfig
from unirl.engines.dataset.engine import build
from unirl.engines.dataset.preference import build as build_preference
from unirl.loop.build import build_parts
from unirl.loop.requests import build_request
from unirl.loop.scoring import score_input
from unirl.loop.step import run_step
from unirl.models.qwen3.config import Qwen3Config
from unirl.models.qwen3.model import build as build_qwen3
from unirl.quickstart import text_checkpoint_path

WORKED_OUT = "<think>\n7+5=12, 4+8+1=13\n</think>\n\n132"


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return Catalog.discover()


@pytest.fixture(scope="module")
def model() -> Any:
    return build_qwen3(Qwen3Config(path=str(text_checkpoint_path())), device="cpu")


def planned(catalog: Catalog, recipe: str, words: Sequence[str], folder: Path) -> Plan:
    plan = compose(recipe, ["~tracker@tracker.report", "run.device=cpu", *words], catalog=catalog, directory=folder)
    verdict = match(plan, catalog=catalog)
    assert verdict.accepted, [str(reason) for reason in verdict.reasons]
    return plan


def steps_of(plan: Plan, catalog: Catalog, folder: Path) -> list[Mapping[str, float]]:
    """The metrics of each step, all of them on all prompts."""
    prompts, parts = read_data(plan).prompts, build_parts(plan, catalog=catalog)
    result: list[Event] = []
    events = EventStream(folder / "events.jsonl")
    events.listen(lambda event: result.append(event) if event.kind == "step" else None)
    try:
        for step in range(plan.run.max_steps):
            run_step(parts, plan, prompts, step=step, events=events, trackers=Trackers({}, events))
    finally:
        events.close()
        for part in (*parts.engines.values(), *parts.rewards.values(), *parts.backends.values()):
            part.close()
    return [event.data["metrics"] for event in result]


def stored(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    file = folder / "stored.jsonl"
    lines = [{"prompt": f"What is 4{number}+85?", **row} for number, row in enumerate(rows)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def read(model: Any, file: Path, *, samples: int = 1, max_new_tokens: int = 40) -> Track:
    request = build_request(
        read_prompts(file),
        track="text",
        sampling=TextSamplingConfig(max_new_tokens=max_new_tokens),
        samples_per_prompt=samples,
        model=model,
        trajectory="none",
        seed=0,
        rollout=0,
        policy_version=0,
    )
    track = build(DatasetConfig(), model=model, device="cpu").generate(request)
    verify_echo(request, track)
    return track


def test_completions_have_the_tokens_of_a_rollout(model: Any, tmp_path: Path) -> None:
    """Those of the tokenizer of transformers in the chat template, with the end of the turn."""
    from transformers import AutoTokenizer

    track = read(model, stored(tmp_path, [{"target": WORKED_OUT}, {"target": "132"}]))
    tokenizer: Any = AutoTokenizer.from_pretrained(text_checkpoint_path(), local_files_only=True)
    for row, text in enumerate((WORKED_OUT, "132")):
        messages = [{"role": "user", "content": f"What is 4{row}+85?"}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        whole = tokenizer(prompt + text + "<|im_end|>")["input_ids"]
        assert [*track.text.prompt_tokens[row].tolist(), *track.text.tokens[row].tolist()] == whole
    assert track.media is not None and track.media.texts == (WORKED_OUT, "132")
    assert track.text.log_probs is None and set(track.status) == {Status.COMPLETED}
    assert model.texts(list(track.text.tokens)) == [WORKED_OUT, "132"]


def test_sides_of_a_pair_are_the_samples_of_their_prompt(model: Any, tmp_path: Path) -> None:
    rows = [{"rejected": "122", "preferred": "125"}, {"preferred": "126", "rejected": "121"}]
    track = read(model, stored(tmp_path, rows), samples=2)
    assert track.media is not None and track.media.texts == ("125", "122", "126", "121")
    scores = build_preference(RewardConfig(), device="cpu").score(score_input(track))
    assert scores.values.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_the_loss_of_sft_is_that_of_transformers(catalog: Catalog, tmp_path: Path) -> None:
    """`model(labels=...)` on the same tokens, with the mean over all tokens of both completions."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = stored(tmp_path, [{"target": WORKED_OUT}, {"target": "126"}])
    words = [f"data.train={file}", "data.prompts_per_step=2", "run.max_steps=2", f"run.dir={tmp_path / 'run'}"]
    first, second = steps_of(planned(catalog, "quickstart-text-sft", words, tmp_path), catalog, tmp_path)
    net = AutoModelForCausalLM.from_pretrained(text_checkpoint_path(), dtype=torch.float32, local_files_only=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(text_checkpoint_path(), local_files_only=True)
    total, count = 0.0, 0
    for row, text in enumerate((WORKED_OUT, "126")):
        messages = [{"role": "user", "content": f"What is 4{row}+85?"}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = torch.tensor([tokenizer(prompt + text + "<|im_end|>")["input_ids"]])
        labels = tokens.clone()
        labels[0, : len(tokenizer(prompt)["input_ids"])] = -100
        length = int((labels != -100).sum())
        with torch.no_grad():
            total += float(net(tokens, labels=labels).loss) * length
        count += length
    # Log-probs of order 1 in fp32.
    assert first["loss"] == pytest.approx(total / count, rel=1e-4)
    assert second["nll"] < first["nll"]


def test_dpo_of_stored_pairs_starts_at_the_logarithm_of_two_and_learns(catalog: Catalog, tmp_path: Path) -> None:
    rows = [{"preferred": WORKED_OUT, "rejected": "122"}, {"preferred": "126", "rejected": "121"}]
    words = [f"data.train={stored(tmp_path, rows)}", "data.prompts_per_step=2", "run.max_steps=4"]
    plan = planned(catalog, "quickstart-text-pairs", [*words, f"run.dir={tmp_path / 'run'}"], tmp_path)
    steps = steps_of(plan, catalog, tmp_path)
    # Live and reference weights are equal, and so are their forwards.
    assert steps[0]["loss"] == pytest.approx(math.log(2), rel=1e-6) and steps[0]["pairs"] == 2
    assert steps[-1]["margin"] > 0 and steps[-1]["implicit_accuracy"] == 1.0


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({}, "engine.path: got no stored samples for engine 'dataset': no row of "),
        ({"preferred": "1"}, "got stored samples of the roles 'preferred', expected one 'target' or"),
        ({"preferred": "1", "rejected": "2", "target": "3"}, "expected one 'target' or one 'preferred' and one"),
        ({"preferred": "1", "rejected": ""}, "got rejected '', expected a completion, a text that is not empty"),
        ({"preferred": "1", "rejected": 2}, "got rejected 2, expected a completion"),
        ({"target": "3"}, ""),
    ],
)
def test_rows_are_checked_before_anything_starts(
    catalog: Catalog, tmp_path: Path, row: Mapping[str, Any], says: str
) -> None:
    words = [f"data.train={stored(tmp_path, [row])}", "data.prompts_per_step=1"]
    plan = planned(catalog, "quickstart-text-pairs", words, tmp_path)
    if not says:
        assert len(read_data(plan).prompts) == 1
        return
    with pytest.raises(DataError, match=says):
        read_data(plan)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1" * 40, "got a completion of 41 tokens with its end, .* expected at most sampling.max_new_tokens, 40"),
        ("132<|im_end|>", "got a stop token, '<|im_end|>' from its tokens, expected the same text again"),
        ("13<|im_start|>2", "got '132' from its tokens, expected the same text again"),
    ],
)
def test_completions_that_no_rollout_gives_are_refused(model: Any, tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(DataError, match=says.replace("|", r"\|")):
        read(model, stored(tmp_path, [{"target": text}]))


@pytest.mark.parametrize(
    ("word", "key"), [("sampling.temperature=0.7", "sampling.temperature"), ("sampling.stop=[END]", "sampling.stop")]
)
def test_settings_that_nothing_samples_with_are_refused(catalog: Catalog, word: str, key: str) -> None:
    plan = compose("quickstart-text-sft", ["data.train=stored.jsonl", word], catalog=catalog)
    assert [reason.key for reason in match(plan, catalog=catalog).reasons] == [key]
