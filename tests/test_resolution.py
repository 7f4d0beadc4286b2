"""On a machine with CUDA the built wheels, and the locks of engines, can be resolved from the package index.

Nothing is installed: uv resolves for another platform, from the metadata that the index has. Where no index answers,
these are not run.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from external_engines.environments import OUT_OF_REACH
from external_engines.locks import read_lock
from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.spec import EngineSpec
from unirl.engine_host.environment import EngineEnvironment

pytestmark = pytest.mark.slow

CATALOG = Catalog.discover()
ENVIRONMENTS: list[EngineEnvironment] = [
    CATALOG.resolve(spec.environment).of(release)
    for spec in CATALOG.specs("engine")
    if isinstance(spec, EngineSpec) and spec.environment
    for release in ("", *spec.releases)
]
STACKS = {
    "images": ["unirl-core", "unirl-model-sd3", "unirl-engine-vllm-omni"],
    "videos": ["unirl-core", "unirl-model-wan22", "unirl-engine-vllm-omni"],
    "images-sglang": ["unirl-core", "unirl-model-sd3", "unirl-engine-sglang"],
    "text": [
        *("unirl-core", "unirl-model-qwen3", "unirl-engine-vllm", "unirl-engine-sglang-llm", "unirl-backend-fsdp2"),
        *("unirl-algo-grpo", "unirl-algo-ppo", "unirl-reward-math"),
    ],
    "text-veomni": [
        *("unirl-core", "unirl-model-causal-lm", "unirl-engine-vllm", "unirl-backend-veomni"),
        *("unirl-algo-grpo", "unirl-reward-math"),
    ],
}
PLATFORM = "x86_64-manylinux_2_28"
"""For which torch's wheels on the index are those for CUDA."""


def resolved(uv: str, *words: object, within: Path) -> str:
    """The requirements that `uv pip compile` writes, in a folder of no project, whose constraints would hold. Not run
    without an index."""
    plain = ("--quiet", "--no-header", "--no-annotate")
    done = subprocess.run(
        [uv, "pip", "compile", *plain, *map(str, words)], cwd=within, capture_output=True, text=True, check=False
    )
    if done.returncode and OUT_OF_REACH.search(done.stderr):
        pytest.skip(f"not run: no package index answers: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("stack", STACKS)
def test_wheels_resolve_on_a_platform_with_cuda(wheels: dict[str, Path], uv: str, tmp_path: Path, stack: str) -> None:
    expected = tmp_path / "wanted.in"
    expected.write_text("".join(f"{name}\n" for name in STACKS[stack]), encoding="utf-8")
    links = next(iter(wheels.values())).parent
    reply = resolved(
        uv,
        *("--python-version", "3.11", "--python-platform", PLATFORM, "--find-links", links, expected),
        within=tmp_path,
    )
    result = dict(line.split("==") for line in reply.splitlines() if "==" in line)
    own = {name: wheels[name].name.split("-")[1] for name in result if name.startswith("unirl-")}
    assert {*STACKS[stack], "unirl-numerics"} <= own.keys()
    assert {name: result[name] for name in own} == own
    # The builds of torch for CPUs alone say so in their version, and ask for none of CUDA's libraries.
    assert "+cpu" not in result["torch"]
    assert any(name.startswith("nvidia-cudnn") for name in result)


@pytest.mark.parametrize(
    "environment", ENVIRONMENTS, ids=lambda environment: f"{environment.name}{environment.release}"
)
def test_a_lock_for_cuda_is_whole_and_the_index_has_its_files(
    environment: EngineEnvironment, uv: str, tmp_path: Path
) -> None:
    """Its versions need each other and nothing else, and no file that it allows is another one on the index."""
    lock = environment.lock("cuda").decode()
    made_for = re.search(r"--python-platform (\S+)", lock)
    assert made_for, "the lock does not say which platform it is for"
    pins = read_lock(lock)
    expected = tmp_path / "wanted.in"
    expected.write_text("".join(f"{name}=={pin.version}\n" for name, pin in pins.items()), encoding="utf-8")
    reply = resolved(
        *(uv, "--generate-hashes", "--python-version", environment.python),
        *("--python-platform", made_for[1], expected),
        within=tmp_path,
    )
    result = read_lock(reply)
    assert {name: pin.version for name, pin in result.items()} == {name: pin.version for name, pin in pins.items()}
    gone = {name for name, pin in pins.items() if not pin.hashes <= result[name].hashes}
    assert not gone, f"the index has other files than the lock of {sorted(gone)}"
