"""The evidence kit of `benchmarks/gpu`: its recipes compose, its predictions are written down, and it runs without a GPU."""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path
from types import ModuleType

import pytest
from small_runs import catalog
from unirl.core.match.match import match
from unirl.core.recipe.compose import compose

KIT = Path(__file__).parents[1] / "benchmarks/gpu"
NAMES = (
    "ray-ipc",
    "ray-shared-memory",
    "ray-sd3-colocate",
    "wan",
    "text",
    "sd3-fsdp",
    "sd3-autocast",
    "sd3-offload",
    "sd3-engine",
)
QUICKSTARTS = ("quickstart-fp32", "quickstart-bf16", "quickstart-text")


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of the kit by its name."""
    monkeypatch.syspath_prepend(KIT)
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return __import__(name)

    yield load
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", "") or "").startswith(str(KIT)):
            del sys.modules[name]


@pytest.mark.parametrize("is_tiny", [False, True], ids=["full", "tiny"])
@pytest.mark.parametrize("name", [*NAMES, *QUICKSTARTS])
def test_every_run_of_the_kit_is_accepted(name: str, is_tiny: bool, kit, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red ring\n")
    runs = kit("runs").runs(tmp_path, is_tiny=is_tiny, device="cuda")
    assert runs.keys() == {*NAMES, *QUICKSTARTS}
    plan = compose(runs[name].recipe, runs[name].words, catalog=catalog())
    assert match(plan, catalog=catalog()).reasons == ()
    samples = plan.data.prompts_per_step * plan.data.samples_per_prompt
    per_sample = plan.only.sampling.max_new_tokens if name == "text" else 1
    assert runs[name].rows == samples * per_sample


def test_the_predictions_are_written_in_the_readme_and_are_about_parts(kit, tmp_path: Path) -> None:
    predictions, parts = kit("predictions"), kit("parts")
    assert (KIT / "README.md").read_text().endswith("\n".join([*predictions.table(), ""]))
    known = parts.parts(tmp_path, theirs=tmp_path, is_dry=False, has_cuda=True)
    assert known.keys() == {*parts.FIRST, *parts.SECOND}
    measured = {name for name, part in known.items() if part.is_measured}
    for card in predictions.CARDS.values():
        assert {one.part for one in predictions.predictions(card)} == measured
        assert all(one.low <= one.value <= one.high for one in predictions.predictions(card))


def test_every_file_with_a_test_for_a_gpu_is_in_the_kit(kit) -> None:
    root = KIT.parents[1]
    files = [*root.glob("tests/test_*.py"), *root.glob("packages/*/tests/*.py"), *root.glob("plugins/*/*/tests/*.py")]
    marked = {str(path.relative_to(root)) for path in files if re.search(r"pytest\.mark\.gpu\b", path.read_text())}
    assert marked == set(kit("parts").GPU_TESTS)


def test_a_number_outside_its_range_is_flagged_and_a_part_that_was_not_run_is_not_passed(kit, tmp_path: Path) -> None:
    machine = {"device": "NVIDIA H100 80GB HBM3", "date": "2026-01-01", "memory_gib": 79.6, "driver": "1", "cuda": "13"}
    machine |= {"python": "3.12", "versions": {"torch": "2.13"}, "commit": "abc", "dry": False}
    measures = {"gemm_fp32_tflops": 20.0, "gemm_bf16_tflops": 700.0}
    done = {"state": "done", "seconds": 9.0, "limit_s": 40, "measures": measures}
    absent = {"state": "not run", "seconds": 0.0, "limit_s": 90, "reason": "no CUDA device"}
    (tmp_path / "results.json").write_text(
        json.dumps({"machine": machine, "parts": {"ceilings": done, "tests": absent}})
    )
    kit("report").write_report(tmp_path)
    text = (tmp_path / "README.md").read_text()
    # 0.75 x 67 = 50.25, and 0.8 to 1.3 of it; 0.7 x 989 = 692.3.
    assert "| ceilings | gemm_fp32_tflops | 20 | 50.2 | 0.40 | **outside 40.2 to 65.3** |" in text
    assert "| ceilings | gemm_bf16_tflops | 700 | 692 | 1.01 |  |" in text
    assert "## Parts: 1 done, 1 not run" in text and "| tests | not run: no CUDA device | 0.0 | 90 |" in text
    assert "| sd3-bare | round_s | not run | 4.47 |  |  |" in text


def test_the_packed_dists_are_locked(kit) -> None:
    pack = kit("pack")
    requirements = [*pack.locked(pack.SITE), *pack.locked(pack.RAY)]
    assert all(version and version != "None" for _, _, version in (one.partition("==") for one in requirements))


def test_an_installed_checkout_has_the_metadata_of_its_wheels(kit, tmp_path: Path) -> None:
    root = KIT.parents[1]
    number = kit("install_tree").install(root, tmp_path)
    assert number == len([*root.glob("packages/*/pyproject.toml"), *root.glob("plugins/*/*/pyproject.toml")])
    (folder,) = tmp_path.glob("unirl_model_sd3-*.dist-info")
    dist = PathDistribution(folder)
    (dist_of_environment,) = (Path(path) for path in sys.path if list(Path(path).glob("unirl_model_sd3-*.dist-info")))
    (expected,) = map(PathDistribution, dist_of_environment.glob("unirl_model_sd3-*.dist-info"))
    for field in ("Name", "Version", "Summary", "License-Expression", "Requires-Dist", "Requires-Python"):
        given, other = (
            sorted("".join(one.split()) for one in each.metadata.get_all(field, [])) for each in (dist, expected)
        )
        assert given == other, field
    assert (
        email.message_from_string(folder.joinpath("METADATA").read_text()).get_payload().startswith("# unirl-model-sd3")
    )
    assert {(one.group, one.name, one.value) for one in dist.entry_points} == {
        (one.group, one.name, one.value) for one in expected.entry_points
    }
    assert all(file.locate().is_file() for file in dist.files or ())
    assert str(root / "plugins/models/sd3/src") in (tmp_path / "unirl_checkout.pth").read_text().splitlines()


@pytest.mark.slow
def test_the_stated_operations_of_a_forward_are_those_that_torch_counts(kit) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    checkpoint, stated = kit("random_checkpoint"), kit("measure").FORWARD_FLOP
    with torch.device("meta"), torch.no_grad():
        image = {"hidden_states": torch.empty(1, 16, 64, 64), "pooled_projections": torch.empty(1, 2048)}
        # 9 latent frames of 60 x 104.
        video = {"hidden_states": torch.empty(1, 16, 9, 60, 104)}
        for name, build, tokens, inputs in (
            ("sd35-medium", checkpoint.sd35_transformer, 333, image),
            ("wan21-1.3b", checkpoint.wan21_transformer, 512, video),
        ):
            net, texts = build(), torch.empty(1, tokens, 4096)
            with FlopCounterMode(display=False) as counter:
                net(timestep=torch.empty(1), encoder_hidden_states=texts, **inputs)
            assert counter.get_total_flops() == stated[name], name


@pytest.mark.slow
def test_a_dry_run_leaves_a_folder_of_evidence(tmp_path: Path) -> None:
    """Cheap parts of the first call, and what needs CUDA."""
    out, names = tmp_path / "out", ("ceilings", "quickstart-fp32", "checkpoint-sd35", "sd3-bare", "tests", "ray-ipc")
    environment = {**os.environ, "PYTHONPATH": str(KIT.parent), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, KIT / "kit.py", *names, "--dry", "--out", out, "--work", tmp_path / "work"]
    subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    parts = json.loads((out / "results.json").read_text())["parts"]
    states = {name: part["state"] for name, part in parts.items()}
    assert states == {**dict.fromkeys(names[:4], "done"), "tests": "not run", "ray-ipc": "not run"}
    assert parts["tests"]["reason"] == parts["ray-ipc"]["reason"] == "no CUDA device"
    assert all(parts[name]["measures"]["rows_per_s"] > 0 for name in ("quickstart-fp32", "sd3-bare"))
    text = (out / "README.md").read_text()
    assert "## Parts: 4 done, 2 not run" in text and "A dry run" in text and "Nothing is predicted" in text
    assert str(tmp_path) not in (out / "log.txt").read_text()
