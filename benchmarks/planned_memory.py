"""`unirl plan` against what a step holds: tensors counted one by one, and the peak of the process's resident memory.

Each recipe is measured in a separate process. Resident memory also has the interpreter, libraries and what the
allocator keeps: its rise over the step is shown, which is at least the activations.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/support"))

CASES = {
    "quickstart": ("quickstart",),
    "quickstart, LoRA": ("quickstart", "backend.trains=lora"),
    "quickstart, copies, bf16 trajectories": (
        *("quickstart", "algorithm.kl_coef=0.01", "backend.reference_copy=true", "backend.ema.kind=constant"),
        "sampling.trajectory_dtype=bfloat16",
    ),
    "quickstart-text": ("quickstart-text", "train.logp_mismatch_max=1e9", "train.logp_mismatch_mean=1e9"),
    "quickstart-edit": ("quickstart-edit",),
    "quickstart-video": ("quickstart-video",),
    "quickstart-i2v": ("quickstart-i2v",),
}
MIB = 2**20


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(json.loads(sys.argv[1]))))
        return
    print(f"{'recipe':38} {'planned MiB':>12} {'held MiB':>10} {'ratio':>6} {'activations':>15} {'RSS rise MiB':>13}")
    for name, words in CASES.items():
        command = [sys.executable, __file__, json.dumps(words)]
        output = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
        row = json.loads(output.stdout.splitlines()[-1])
        planned, held = sum(row["planned"].values()), sum(row["held"].values())
        pair = f"{row['planned']['activations'] / MIB:.1f}/{row['held']['activations'] / MIB:.1f}"
        numbers = f"{planned / MIB:12.1f} {held / MIB:10.1f} {planned / held:6.3f} {pair:>15} {row['rss'] / MIB:13.1f}"
        print(f"{name:38} {numbers}")


def measure(words: list[str]) -> dict[str, object]:
    from held_memory import held_in_a_step
    from unirl.core.plugins.catalog import Catalog
    from unirl.core.recipe.compose import compose
    from unirl.tools.plan.memory_plan import memory_plan

    catalog = Catalog.discover()
    recipe, *overrides = words
    plan = compose(recipe, [*overrides, "run.threads=1", "~tracker.report"], catalog=catalog)
    (process,) = memory_plan(plan, catalog=catalog).processes
    # Linux counts in KiB.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = held_in_a_step(plan, catalog=catalog)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"planned": dict(process.items), "held": held, "rss": (after - before) * 1024}


if __name__ == "__main__":
    main()
