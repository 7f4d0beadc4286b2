"""The wheels alone, in an empty environment, train."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from external_engines import environments
from siblings import with_siblings

# What others need is read from the settings of all packages.

ROOT = Path(__file__).parents[1]
Run = Callable[..., subprocess.CompletedProcess[str]]
VIDEO = ("unirl-model-wan22", "unirl-engine-vllm-omni", "unirl-engine-cpu")


@pytest.fixture(scope="module")
def python(wheels: dict[str, Path], run: Run, uv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheels of the quickstarts, a video model and its engine, and none of our
    other wheels."""
    tmp_path = tmp_path_factory.mktemp("empty")
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "bootstrap.py")
    assert spec is not None and spec.loader is not None
    bootstrap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bootstrap)

    python = tmp_path / "venv" / "bin" / "python"
    run(uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv")
    # The versions under test, torch's build included; what the wheels need is for the wheels to say.
    listed = run(uv, "pip", "freeze", "--python", sys.executable, "--exclude-editable").stdout
    pins = tmp_path / "pins.txt"
    pins.write_text("".join(line + "\n" for line in listed.splitlines() if not line.startswith("unirl")))
    links = [part for place in bootstrap._find_links() for part in ("--find-links", place)]
    backend = [] if links or ("torch==2" in listed and "+cpu" not in listed) else ["--torch-backend", "cpu"]
    run(
        *(uv, "pip", "install", "--quiet", "--python", python, "--constraint", pins, *links, *backend),
        *(wheels[name] for name in with_siblings("unirl-quickstart", *VIDEO)),
    )
    origin = run(python, "-c", "import unirl.core; print(unirl.core.__file__)", cwd=tmp_path).stdout
    assert str(tmp_path) in origin, "the tests must run the wheels, not the checkout"
    return python


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_wheels_alone_train_two_steps_in_an_empty_environment(python: Path, run: Run, tmp_path: Path) -> None:
    words = ("train", "quickstart", "run.max_steps=2", "run.dir=out", "eval.num_prompts=4")
    run(python, "-m", "unirl.core", *words, cwd=tmp_path, HF_HUB_OFFLINE="1")
    check_two_steps(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_wheels_alone_train_two_experts_with_the_real_engine(python: Path, run: Run, tmp_path: Path) -> None:
    """`pip install unirl-core unirl-model-wan22 unirl-engine-vllm-omni`, with a backend, an algorithm and a reward."""
    environments.make("vllm-omni")
    write = "from pathlib import Path; from unirl.models.wan.tiny import write_wan22; write_wan22(Path('tiny'), seed=0)"
    run(python, "-c", write, cwd=tmp_path)
    (tmp_path / "prompts.txt").write_text("a red ring rolls\na blue disc\n")
    small = ["height=32", "width=48", "frames=5", "max_sequence_length=16", "num_inference_steps=4"]
    run(
        *(python, "-m", "unirl.core", "train", "wan22/flow-grpo", "engine=vllm-omni", "data.train=prompts.txt"),
        *("model.path=tiny", "model.dtype=float32", "model.text_dtype=float32", "backend.mixed_precision=none"),
        *("run.max_steps=2", "run.dir=out", "data.prompts_per_step=2", "data.samples_per_prompt=2", "eval=null"),
        *(f"sampling.{word}" for word in small),
        cwd=tmp_path,
        HF_HUB_OFFLINE="1",
    )
    check_two_steps(tmp_path / "out")


def check_two_steps(folder: Path) -> None:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2]
    assert events[-1]["status"] == "done"
