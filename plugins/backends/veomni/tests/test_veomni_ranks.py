"""The VeOmni backend on two and four gloo ranks against one rank of fsdp2 here, where VeOmni is not imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from causal_lm_moe import write as write_moe
from unirl.models.causal_lm.tiny import write as write_dense
from unirl.models.wan.tiny import write_wan21
from veomni_cases import CASES, make_backend, make_model, run

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SCRIPT = Path(__file__).with_name("veomni_worlds.py")
ALL = [(world, case) for world, cases in CASES.items() for case in cases if case not in ("anyprecision", "bf16")]
GRADIENT_BOUND = 1e-6
"""Relative to the largest entry of a tensor: sums over rows and ranks in another order, 8 rows of fp32 at 6e-8 each."""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Results of rank 0 by the number of ranks, and the folder of checkpoints."""
    folder = tmp_path_factory.mktemp("worlds")
    write_moe(folder / "moe")
    write_dense(folder / "dense", seed=0)
    write_wan21(folder / "wan21", seed=0)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True, env=environment, timeout=580
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return {world: torch.load(folder / f"found-{world}.pt", weights_only=False) for world in CASES}, folder


@pytest.fixture(scope="module")
def alone(worlds):
    """Results of one rank of fsdp2 with all rows, by case; each is run once."""
    found = {}

    def of(case):
        if case not in found:
            found[case] = run("fsdp2", case, worlds[1])
        return found[case]

    return of


def largest(result, expected):
    assert result.keys() == expected.keys()
    return max(float((result[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected)


@pytest.mark.timeout(700)
@pytest.mark.parametrize(("world", "case"), ALL)
def test_ranks_give_the_gradients_weights_and_metrics_of_one_rank_of_fsdp2(world, case, worlds, alone):
    result, expected = worlds[0][world][case], alone(case)
    assert largest(result["gradients"], expected["gradients"]) < GRADIENT_BOUND
    # After three updates of lr g / eps at most: 3 x 1e-2 x (1e-6 x 1e-2) / 1e-4 = 3e-6 for gradients of up to 1e-2.
    for kind in ("ema", "live", "critic", "fake"):
        for name, tensor in expected[kind].items():
            torch.testing.assert_close(result[kind][name], tensor, rtol=1e-4, atol=1e-5)
    assert result["metrics"].keys() == expected["metrics"].keys()
    for name, value in expected["metrics"].items():
        assert result["metrics"][name] == pytest.approx(value, rel=1e-4, abs=2e-5), name


@pytest.mark.timeout(700)
@pytest.mark.parametrize(("world", "case"), ALL)
def test_whole_weights_leave_it_as_they_leave_fsdp2(world, case, worlds, alone):
    """Names, shapes, dtypes and, before training, bits; experts included, which no rank holds whole."""
    result, expected = worlds[0][world][case]["first"], alone(case)["first"]
    assert list(result) == list(expected)
    for name, tensor in expected.items():
        # Adapters merged into a weight are multiplied as matrices of the same shape.
        assert result[name].dtype == tensor.dtype and torch.equal(result[name], tensor), name


@pytest.mark.timeout(700)
@pytest.mark.parametrize(("world", "case"), [(world, case) for world, cases in CASES.items() for case in cases])
def test_a_resumed_run_goes_on_bit_for_bit_and_exported_weights_are_adopted(world, case, worlds):
    result = worlds[0][world][case]
    assert result["loaded"] == (3, result["checksum"])
    assert result["resumed"] == result["straight"] != result["checksum"]
    assert result.get("adopted", result["checksum"]) == result["checksum"]


@pytest.mark.timeout(700)
@pytest.mark.parametrize(("world", "case"), ALL)
def test_a_checkpoint_of_several_ranks_loads_on_one_rank_of_fsdp2(world, case, worlds):
    """Weights, averages and moments whole, those of split experts included."""
    results, folder = worlds
    backend = make_backend("fsdp2", case, make_model(case, folder))
    backend.load(folder / case)
    kind = "full" if backend._config.trains == "full" else "merged"
    assert (backend.version, backend.export_weights(kind=kind).checksum) == results[world][case]["loaded"]
    averages = backend.export_weights(kind=kind, policy="ema").tensors
    assert all(torch.equal(averages[name], tensor) for name, tensor in results[world][case]["ema"].items())
    backend.close()


@pytest.mark.timeout(700)
@pytest.mark.parametrize("case", ["words-sequence", "words-sequence-lora"])
def test_ranks_that_share_the_tokens_of_texts_give_the_log_probs_and_rollouts_of_one(case, worlds, alone):
    result, expected = worlds[0][2][case]["texts"], alone(case)["texts"]
    # fp32: logits of up to 10 have a rounding of 1e-6, and sums in another order for another shape a few of them.
    torch.testing.assert_close(result["log_probs"], expected["log_probs"], rtol=0, atol=2e-5)
    assert [row.tolist() for row in result["rollout"]] == [row.tolist() for row in expected["rollout"]]


@pytest.mark.timeout(700)
def test_experts_are_split_and_sharded(worlds):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    # 4 experts of [96, 64]: two of them on each rank, then in halves, then on both pairs of ranks.
    assert worlds[0][2]["experts"]["shards"][name] == (2, 96, 64)
    assert worlds[0][4]["experts-sharded"]["shards"][name] == (2, 48, 64)
    assert worlds[0][4]["experts-hsdp"]["shards"][name] == (2, 96, 64)


@pytest.mark.timeout(700)
def test_the_optimizer_with_moments_in_bf16_learns_about_as_adamw(worlds, alone):
    result, expected = worlds[0][2]["anyprecision"], alone("anyprecision")
    assert largest(result["gradients"], expected["gradients"]) < GRADIENT_BOUND
    # Each of three steps moves a weight by about lr = 1e-2; moments of 8 bits are off by 2**-8 of it.
    for name, tensor in expected["live"].items():
        torch.testing.assert_close(result["live"][name], tensor, rtol=0, atol=3 * 1e-2 * 2**-6)
    assert any(not torch.equal(result["live"][name], tensor) for name, tensor in expected["live"].items())


@pytest.mark.timeout(700)
def test_bf16_is_computed_in_bf16_with_fp32_weights(worlds, alone):
    result, expected = worlds[0][2]["bf16"], alone("bf16")
    # The same casts on both; gradients of a rank are rounded to 8 bits before they are summed in fp32.
    assert largest(result["gradients"], expected["gradients"]) < 2**-6
    assert largest(result["gradients"], alone("full")["gradients"]) > GRADIENT_BOUND
    assert {tensor.dtype for tensor in result["live"].values()} == {torch.float32}


@pytest.mark.timeout(700)
def test_meshes_that_fit_neither_ranks_nor_model_are_refused(worlds):
    said = worlds[0][2]["refusals"]
    assert said["dense"].startswith("backend.mesh.expert: got 2, but ToyNet has no experts of the layout")
    assert said["uneven"].startswith("backend.mesh.expert: got 2, but 1 (ranks of one copy) is not divisible by it")
    assert said["ranks"].startswith("backend.mesh.shard: got 3, but 2 (ranks) is not divisible by it")
