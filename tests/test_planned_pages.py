"""The numbers of the how-to pages small-cards.md and published-runs.md are what `unirl plan` computes, and a quantized
model is read layer by layer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from published_sizes import write_published
from small_runs import catalog
from unirl.core.match.match import match
from unirl.core.recipe.compose import compose
from unirl.loop.build import build_parts
from unirl.tools.plan.command import PEAK_TFLOPS, UTILISATION, plan_data
from unirl.tools.plan.memory_plan import memory_plan
from unirl.tools.plan.prediction import MemoryPlan
from unirl.train_host.quantize import dequantized, is_quantized

pytestmark = [
    pytest.mark.slow,
    # torch hides it where it looks at the gradient of a tensor to make a fake of it; as an error it is raised before that.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

PAGES = Path(__file__).parents[1] / "docs/how-to"
SMALL_CARDS, PUBLISHED_RUNS = (
    (PAGES / name).read_text(encoding="utf-8") for name in ("small-cards.md", "published-runs.md")
)
ROWS = re.findall(r"^\| (\S+) \| (\d+) \| `(.+)` \| ([\d.]+) \|$", SMALL_CARDS, re.MULTILINE)
"""Recipe, GiB of the card, overrides, GiB that are planned."""
OFFLOADED = re.findall(
    r"^\| (\S+) \| (\d+) \| `(.+)` \| ([\d.]+) \| ([\d.]+) \| (\d+) \| (\d+) \|$", SMALL_CARDS, re.MULTILINE
)
"""The same, and GiB that are pinned, GiB that are copied in a step, and the seconds of that."""
RUNS = re.findall(r"^\| `(\S+/\S+)` \|", PUBLISHED_RUNS, re.MULTILINE)
DEVICE = 80 * 2**30


def planned(recipe: str, folder: Path, *words: str) -> MemoryPlan:
    """The plan of a recipe on the published sizes of its model."""
    write_published(folder / "model", recipe.partition("/")[0])
    media = [{"modality": "image", "role": "source", "uri": "source.png"}] if "edit" in recipe else []
    Image.new("RGB", (512, 512)).save(folder / "source.png")
    rows = [{"prompt": f'a sign "{n}"', "metadata": {"answer": "1"}, "media": media} for n in range(128)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    places = [f"model.path={folder / 'model'}", f"data.train={folder / 'prompts.jsonl'}"]
    plan = compose(recipe, [*places, *words], catalog=catalog())
    verdict = match(plan, catalog=catalog())
    assert verdict.accepted, verdict.reasons
    return memory_plan(plan, catalog=catalog())


def line(recipe: str, plan: MemoryPlan) -> str:
    """A row of the table of published runs."""
    train, *others = (process for process in plan.processes if process.role != "reward")
    gib = {process.role: f"{process.on_device(DEVICE) / 2**30:.0f}" for process in (train, *others)}
    other = ", ".join(f"{each.role} {gib[each.role]}" for each in others) or "-"
    seconds = plan_data(plan, speed=PEAK_TFLOPS * 1e12 * UTILISATION)["seconds"]
    shown = " + ".join(f"{each:.0f}" for each in seconds.values())
    count = train.count + sum(each.count for each in others if not each.shares_device)
    return f"| `{recipe}` | {count} | {gib['train']} | {other} | {plan.flops.total / 1e15:.0f} | {shown} |"


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", RUNS)
def test_the_page_of_published_runs_has_the_planners_numbers(recipe: str, tmp_path: Path) -> None:
    plan = planned(recipe, tmp_path)
    assert plan.overfull(DEVICE) == []
    expected = line(recipe, plan)
    assert expected in PUBLISHED_RUNS.splitlines(), f"write this line into the page:\n{expected}"


@pytest.mark.nightly
@pytest.mark.torchao
@pytest.mark.parametrize(
    ("recipe", "card", "words", "planned_gib"), ROWS, ids=lambda value: value if "/" in value else ""
)
def test_the_page_of_small_cards_has_the_planners_numbers(
    recipe: str, card: str, words: str, planned_gib: str, tmp_path: Path
) -> None:
    (process,) = planned(recipe, tmp_path, *words.split()).processes
    assert process.total < int(card) * 2**30
    assert planned_gib == f"{process.total / 2**30:.1f}", {
        name: f"{size / 2**30:.2f}" for name, size in {**process.items, **process.estimates}.items()
    }


@pytest.mark.nightly
@pytest.mark.parametrize("row", OFFLOADED, ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_page_of_small_cards_has_the_planners_copies(row: tuple[str, ...], tmp_path: Path) -> None:
    recipe, card, words, *shown = row
    plan = planned(recipe, tmp_path, *words.split())
    (process,) = plan.processes
    assert process.total < int(card) * 2**30 and plan.bus_bytes is not None
    seconds = sum(plan_data(plan, speed=1e15)["bus_seconds"].values())
    gib = [size / 2**30 for size in (process.total, plan.pinned_bytes, plan.bus_bytes.total)]
    assert shown == [f"{gib[0]:.1f}", f"{gib[1]:.1f}", f"{gib[2]:.0f}", f"{seconds:.0f}"]


def test_the_page_names_a_card_of_each_size() -> None:
    assert [(recipe, card) for recipe, card, *_ in OFFLOADED] == [
        ("sd3/flow-grpo", "8"),
        ("sd3/flow-grpo", "16"),
        ("z-image/flow-grpo", "12"),
        ("qwen-image/flow-grpo", "24"),
    ]
    assert {(recipe, card) for recipe, card, *_ in ROWS} == {
        ("sd3/flow-grpo", "16"),
        ("z-image/flow-grpo", "24"),
        ("qwen-image/flow-grpo", "48"),
        ("z-image/flow-grpo", "16"),
        ("qwen-image/flow-grpo", "32"),
    }


@pytest.mark.torchao
def test_a_quantized_model_has_the_checkpoints_values_and_is_never_whole() -> None:
    """int8: within half a step of 255 from -max to max of an output channel. The transformer was built without values
    and its tensors were read one by one, so the largest that was ever there besides its own is one layer."""
    words = ("run.device=cpu", "run.threads=1", "~tracker.report", "backend.trains=lora")
    small = ("backend.quantize=int8", "backend.activation_checkpointing=true")
    whole = build_parts(compose("quickstart", words, catalog=catalog()), catalog=catalog())
    parts = build_parts(compose("quickstart", [*words, *small], catalog=catalog()), catalog=catalog())
    module, original = parts.only.model.trainable, whole.only.model.trainable
    assert vars(parts.only.model)["_values"] and not vars(whole.only.model)["_values"]
    quantized = 0
    for (name, weight), (same, expected) in zip(module.named_parameters(), original.named_parameters(), strict=True):
        assert name == same
        if is_quantized(weight):
            quantized += 1
            # And the rounding of fp32.
            step = expected.abs().amax(1, keepdim=True) / 255 * (1 + 1e-4)
            assert ((dequantized(weight) - expected).abs() <= step).all(), name
        else:
            assert torch.equal(weight, expected), name
    linear = [part for block in original.transformer_blocks for part in block.modules()]  # type: ignore[union-attr]
    frozen = [part for part in linear if isinstance(part, torch.nn.Linear) and not part.weight.requires_grad]
    assert quantized == len(frozen) > 0
    for built in (parts, whole):
        for part in (built.only.engine, built.only.backend, *built.rewards.values()):
            part.close()
