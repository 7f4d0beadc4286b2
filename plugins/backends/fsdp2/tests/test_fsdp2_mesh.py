"""Copies of shards, and layers split over ranks: four gloo ranks against one rank here."""

import dataclasses
from pathlib import Path

import pytest
import torch
from fsdp2_four_ranks import CASES, SPLIT, backend_of, run
from fsdp2_toy import ToyModel, make_backend
from rank_processes import launch
from unirl.backends.fsdp2.config import LoraSettings, MeshConfig
from unirl.core.errors import RecipeError
from unirl.models.hunyuan_video15.tiny import write as write_joint
from unirl.models.qwen3.tiny import write as write_text
from unirl.models.wan.tiny import write_wan21, write_wan22

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SCRIPT = Path(__file__).with_name("fsdp2_four_ranks.py")


def largest(tensor):
    return float(tensor.abs().max())


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    write_wan21(folder / "wan21", seed=0)
    write_wan22(folder / "wan22", seed=0)
    write_text(folder / "qwen3", seed=0)
    write_joint(folder / "hunyuan-video15", seed=0)
    launch(SCRIPT, folder / "store", folder, ranks=4)
    return torch.load(folder / "found.pt", weights_only=False), folder


@pytest.mark.parametrize("case", CASES)
def test_a_mesh_gives_the_gradients_weights_and_metrics_of_one_rank(case, four_ranks):
    found, folder = four_ranks
    alone, result = run(case, folder), found[case]
    # Those of videos are sampled by two ranks: sums of matrix products in another order, over four steps.
    assert largest(result["sampled"] - alone["sampled"]) < 1e-5 * largest(alone["sampled"])
    assert result["gradients"].keys() == alone["gradients"].keys()
    for name, expected in alone["gradients"].items():
        # fp32 sums in another order: 1e-6 of the largest element, as on two ranks. That of an adapter which the output
        # does not depend on is 0.
        assert largest(result["gradients"][name] - expected) <= 2e-6 * largest(expected), name
    for name, expected in alone["live"].items():
        # Three updates of lr / eps times the rounding of a gradient, 10 * 1e-7, and of Adam's fp32 state.
        torch.testing.assert_close(result["live"][name], expected, rtol=1e-4, atol=1e-5)
    assert result["metrics"].keys() == alone["metrics"].keys()
    for name, expected in alone["metrics"].items():
        assert result["metrics"][name] == pytest.approx(expected, rel=1e-4, abs=2e-5), name


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_a_mesh_loads_on_one_rank(case, four_ranks):
    result, folder = four_ranks
    backend, _ = backend_of(case, folder, alone=True)
    backend.load(folder / case)
    assert backend.version == 3
    live = backend.export_weights(kind="merged").tensors
    assert all(torch.equal(live[name], result[case]["live"][name]) for name in live)


def test_ranks_of_a_sequence_refuse_different_rows_and_what_they_cannot_share(four_ranks):
    said = four_ranks[0]["refusals"]
    assert "rank 0 has the samples ['s0', 's4']" in said["rows"] and "mesh.sequence" in said["rows"]
    assert said["tokens"].startswith("backend.mesh.sequence: got 2, but a latent has 1 tokens")
    assert said["heads"].startswith("backend.mesh.sequence: got 4, but the 2 attention heads")


def test_a_mesh_that_does_not_fit_the_ranks_is_refused_with_the_arithmetic():
    with pytest.raises(RecipeError, match=r"backend.mesh.shard: got 2, but 1 \(ranks / mesh.tensor 1\) is not"):
        make_backend(mesh=MeshConfig(shard=2))
    with pytest.raises(RecipeError, match=r"backend.mesh.tensor: got 2, but 1 \(ranks\) is not.*multiple of 2"):
        make_backend(mesh=MeshConfig(tensor=2))


@pytest.mark.parametrize(
    ("plan", "settings", "says"),
    [
        ({"blocks.*.middle": "colwise"}, {"trains": "full"}, r"'blocks.\*.middle' .* matches no module"),
        (
            {"blocks.*.up": "colwise"},
            {"lora": LoraSettings(targets=["up"])},
            "is adapted by LoRA or is not a linear layer",
        ),
    ],
)
def test_a_plan_that_matches_nothing_or_what_lora_adapts_is_refused(plan, settings, says, monkeypatch):
    from unirl.backends.fsdp2 import backend

    # The check comes before any layer is split, so one rank can take the place of the mesh's two.
    monkeypatch.setattr(backend, "Ranks", lambda *a, **k: None)
    model = ToyModel(spec=dataclasses.replace(SPLIT, tensor_parallel=plan))
    with pytest.raises(RecipeError, match=says):
        make_backend(model, mesh=MeshConfig(tensor=2), **settings)
