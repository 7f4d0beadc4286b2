"""The numbers of docs/how-to/small-cards.md are what `unirl plan` computes, and a quantized model is read layer by layer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from published_sizes import write_published
from small_runs import catalog
from unirl.core.match.match import match
from unirl.core.recipe.compose import compose
from unirl.loop.build import build_parts
from unirl.tools.plan.memory_plan import memory_plan
from unirl.train_host.quantize import dequantized, is_quantized

pytestmark = [pytest.mark.slow, pytest.mark.torchao]

PAGE = Path(__file__).parents[1] / "docs/how-to/small-cards.md"
ROWS = re.findall(r"^\| (\S+) \| (\d+) \| `(.+)` \| ([\d.]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
"""Recipe, GiB of the card, overrides, GiB that are planned."""


# torch hides it where it looks at the gradient of a tensor to make a fake of it; as an error it is raised before that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.nightly
@pytest.mark.parametrize(("recipe", "card", "words", "planned"), ROWS, ids=lambda value: value if "/" in value else "")
def test_the_page_has_the_planners_numbers(recipe: str, card: str, words: str, planned: str, tmp_path: Path) -> None:
    write_published(tmp_path / "model", recipe.partition("/")[0])
    (tmp_path / "prompts.txt").write_text("".join(f"a ring number {row}\n" for row in range(64)), encoding="utf-8")
    places = [f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 'prompts.txt'}"]
    plan = compose(recipe, [*places, *words.split()], catalog=catalog())
    verdict = match(plan, catalog=catalog())
    assert verdict.accepted, verdict.reasons
    (process,) = memory_plan(plan, catalog=catalog()).processes
    assert process.total < int(card) * 2**30
    assert planned == f"{process.total / 2**30:.1f}", {
        name: f"{size / 2**30:.2f}" for name, size in process.items.items()
    }


def test_the_page_names_a_card_of_each_size() -> None:
    assert {(recipe, card) for recipe, card, *_ in ROWS} == {
        ("sd3/flow-grpo", "16"),
        ("z-image/flow-grpo", "24"),
        ("qwen-image/flow-grpo", "48"),
        ("z-image/flow-grpo", "16"),
        ("qwen-image/flow-grpo", "32"),
    }


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
