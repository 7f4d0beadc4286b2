"""The numbers of docs/explanation/planning.md are what `unirl plan` computes for Wan 2.2 A14B."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from published_sizes import write_published
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.tools.plan.command import PEAK_TFLOPS, UTILISATION, plan_data
from unirl.tools.plan.memory_plan import memory_plan
from unirl.tools.plan.model_size import ModelSize
from unirl.tools.plan.prediction import MemoryPlan

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PAGE = Path(__file__).parents[1] / "docs/explanation/planning.md"
TEXT = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
FULL = "backend.trains=full backend.defer_gradient_sync=false backend.reference_copy=true"
SEPARATE = "launcher.train_ranks=48 launcher.placement=separate launcher.rollout_workers=16 engine=vllm-omni"
SHORT = "sampling.sde.mode=window sampling.sde.window=4 train.micro_batch_size=2"
CASES = (
    "launcher.train_ranks=8",
    "launcher.train_ranks=8 train.micro_batch_size=4",
    f"launcher.train_ranks=8 {SHORT}",
    f"launcher.train_ranks=64 {SHORT}",
    f"{SEPARATE} {SHORT}",
    f"launcher.train_ranks=64 {FULL} {SHORT}",
    f"{SEPARATE} {FULL} {SHORT}",
)
DEVICE_BYTES = 80 * 2**30


@dataclass(frozen=True)
class Planner:
    folder: Path
    catalog: Catalog
    sizes: dict[tuple[bool, bool], ModelSize]

    def plan(self, words: str) -> MemoryPlan:
        places = [f"model.path={self.folder / 'wan'}", f"data.train={self.folder / 'prompts.txt'}"]
        plan = compose("wan22/flow-grpo", ["launcher=ray", *places, *words.split()], catalog=self.catalog)
        verdict = match(plan, catalog=self.catalog)
        assert verdict.accepted, verdict.reasons
        # Ranks and placement do not change what a row takes.
        key = (FULL in words, SHORT in words)
        result = memory_plan(plan, catalog=self.catalog, size=self.sizes.get(key))
        self.sizes[key] = result.size
        return result


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    folder = tmp_path_factory.mktemp("wan22")
    write_published(folder / "wan", "wan22")
    (folder / "prompts.txt").write_text("".join(f"a ring number {row}\n" for row in range(64)), encoding="utf-8")
    return Planner(folder, Catalog.discover(), {})


def row(words: str, prediction: MemoryPlan) -> str:
    """A line of the page's table."""
    data = plan_data(prediction, speed=PEAK_TFLOPS * 1e12 * UTILISATION)
    memory = ", ".join(f"{one.count} {one.role}: {one.total / 2**30:.0f}" for one in prediction.processes)
    fits = "no" if prediction.overfull(DEVICE_BYTES) else "yes"
    sync = f"{prediction.sync_bytes / 1e9:.1f}" if prediction.sync_bytes else "none"
    seconds = " + ".join(f"{each:.0f}" for each in data["seconds"].values())
    return f"| `{words}` | {memory} | {fits} | {sync} | {prediction.flops.total / 1e15:.0f} | {seconds} |"


@pytest.mark.parametrize("words", CASES)
def test_the_page_has_the_planners_numbers(words: str, planner: Planner) -> None:
    expected = row(words, planner.plan(words))
    assert expected in TEXT.splitlines(), f"write this line into {PAGE.name}:\n{expected}"


def test_parameters_and_operations_are_the_closed_formulas_of_the_config(planner: Planner) -> None:
    """Per block: self-attention 4 d^2, cross-attention 4 d^2, feed-forward 2 d f; q and k have norms over d, the second
    norm has weight and bias, and there are 6 d modulations. The rest: embeddings of patches, texts, time, and the head."""
    size = planner.plan(f"launcher.train_ranks=64 {FULL} {SHORT}").size
    d, f, layers, text, out = 5120, 13824, 40, 4096, 64

    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    block = 8 * linear(d, d) + linear(d, f) + linear(f, d) + 4 * d + 2 * d + 6 * d
    time = linear(256, d) + linear(d, d) + linear(d, 6 * d)
    rest = linear(out, d) + linear(text, d) + linear(d, d) + time + linear(d, out) + 2 * d
    assert size.trained_elements == 2 * (layers * block + rest)
    assert size.block_elements == block
    # 33 frames of 240 x 416: 9 x 30 x 52 latents in patches of 2 x 2. Attention twice L^2 d (or L 512 d), 2 operations each.
    tokens, prompt = 9 * 15 * 26, 512
    matrices = 2 * tokens * (6 * d * d + 2 * d * f) + 2 * prompt * 2 * d * d
    attention = 4 * tokens * tokens * d + 4 * tokens * prompt * d
    ends = 2 * tokens * 2 * out * d + 2 * prompt * (text * d + d * d) + 2 * (256 * d + d * d + 6 * d * d)
    assert size.flops == layers * (matrices + attention) + ends


def test_the_page_shows_the_formulas_that_are_tested() -> None:
    assert "28.577 billion parameters" in TEXT and re.search(r"embeddings = 97\.7 TFLOP\n", TEXT)
