"""A forward of `model=diffusers` against that of the model written for the pipeline: same checkpoint, rows and sigmas.

    python benchmarks/generic_model.py [--pairs 40] [--threads 1]

On the random miniatures of the dedicated models, whose forwards are short: the difference is mostly the Python of the
pipeline's own call. Prints minima of CPU time over interleaved pairs, without and with a gradient.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.diffusers.config import DiffusersConfig
from unirl.models.diffusers.model import build

MODELS = {"sd3": 1, "z-image": 1, "flux2-klein": 1, "qwen-image": 1, "wan21": 5}
"""Frames of each."""
ROWS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'model':12} {'gradient':>9} {'dedicated':>10} {'generic':>9} {'difference':>11}")
    for name, frames in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            compare(name, Path(folder) / "tiny", frames=frames, pairs=options.pairs)


def compare(name: str, folder: Path, *, frames: int, pairs: int) -> None:
    package = f"unirl.models.{name.replace('-', '_')}"
    import_module(f"{package}.tiny").write(folder, seed=0)
    module, _, cls = import_module(f"{package}.plugin").SPEC.config.partition(":")
    config = getattr(import_module(module), cls)(path=str(folder))
    dedicated: Any = import_module(f"{package}.model").build(config, device="cpu")
    models: dict[str, Any] = {"dedicated": dedicated, "generic": build(DiffusersConfig(path=str(folder)), device="cpu")}
    sampling = LatentSamplingConfig(height=64, width=96, frames=frames, max_sequence_length=64)
    inputs = Inputs.of_texts([f"a red ring {number}" for number in range(ROWS)])
    conditions = {key: model.encode(inputs, sampling=sampling) for key, model in models.items()}
    x = torch.randn((ROWS, *dedicated.latent_shape(sampling)))
    sigma = torch.linspace(0.9, 0.3, ROWS)
    for is_trained in (False, True):
        best = dict.fromkeys(models, float("inf"))
        for _ in range(pairs + 1):
            for key, model in models.items():
                start = time.process_time()
                with torch.set_grad_enabled(is_trained):
                    velocity = model.velocity(x, sigma, conditions[key])
                if is_trained:
                    velocity.square().sum().backward()
                best[key] = min(best[key], time.process_time() - start)
        milliseconds = {key: 1000 * seconds for key, seconds in best.items()}
        gap = milliseconds["generic"] - milliseconds["dedicated"]
        print(
            f"{name:12} {'yes' if is_trained else 'no':>9} {milliseconds['dedicated']:7.2f} ms "
            f"{milliseconds['generic']:6.2f} ms {gap:8.2f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
