"""Models larger than a rank: two ranks build one and send its weights, and their tensors are counted."""

import json
from pathlib import Path

import pytest
from rank_processes import launch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging
from unirl.model_host.model_files import no_progress_bars
from unirl.models.qwen3.tiny import write

SCRIPT = Path(__file__).with_name("fsdp2_scale_ranks.py")
SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "layer_types": ["full_attention"] * 8,
}
KINDS = [{"trains": "full", "dtype": "bfloat16"}, {"trains": "lora", "dtype": "float32"}]


def both_ways(folder, kinds, *, ranks, teaches=False):
    """Results of every rank for each kind, after a lazy build and after an eager one. teaches: then those of the model
    as a teacher."""
    cases = [{**kind, "lazy": lazy} for kind in kinds for lazy in (True, False)]
    (folder / "job.json").write_text(json.dumps({"ranks": ranks, "cases": cases, "teaches": teaches}))
    launch(SCRIPT, folder / "store", folder, ranks=ranks)
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    results = [list(of_case) for of_case in zip(*found, strict=True)]
    return list(zip(results[::2], results[1::2], strict=True))


def assert_same(lazy, eager):
    """Bit for bit: every shard of every parameter and buffer, and what engines are sent."""
    for mine, other in zip(lazy, eager, strict=True):
        assert mine["shards"] == other["shards"]
        assert mine["checksum"] == other["checksum"] == lazy[0]["checksum"]
        assert mine["tied"] == other["tied"]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Results on two ranks for a model of 200 MB in float32, its output projection tied, and its bytes."""
    folder = tmp_path_factory.mktemp("large")
    checkpoint = folder / "checkpoint"
    write(checkpoint, seed=0)
    (checkpoint / "model.safetensors").unlink()
    model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(checkpoint, **SIZES))
    # Several files, as large checkpoints have them.
    with no_progress_bars(transformers_logging):
        model.save_pretrained(checkpoint, max_shard_size="64MB")
    write(folder / "student", seed=0)
    *results, taught = both_ways(folder, KINDS, ranks=2, teaches=True)
    return results, sum(param.nbytes for param in model.parameters()), taught


@pytest.mark.slow
@pytest.mark.nightly
def test_no_rank_ever_holds_a_lazily_built_model_whole(large):
    results, size, _ = large
    assert 190e6 < size < 210e6
    for lazy, eager in results:
        assert_same(lazy, eager)
        for rank in range(2):
            # A shard is half of it, and the piece being read a 32nd.
            assert lazy[rank]["built"] < 0.6 * size
            assert eager[rank]["built"] > size


@pytest.mark.slow
@pytest.mark.nightly
def test_no_rank_ever_holds_a_teacher_whole(large):
    _, size, (lazy, eager) = large
    for rank in range(2):
        # As above, and the student, of 0.2 %.
        assert lazy[rank]["held"] < 0.51 * size and lazy[rank]["built"] < 0.6 * size
        assert eager[rank]["held"] > 0.99 * size
        # The same operations on the same weights.
        assert lazy[rank]["scores"] == eager[rank]["scores"]
    assert lazy[0]["scores"] != lazy[1]["scores"]


@pytest.mark.slow
@pytest.mark.nightly
def test_no_rank_holds_more_than_a_few_tensors_of_an_update(large):
    results, size, _ = large
    for result in (rank for results_of in results for ranks in results_of for rank in ranks):
        # At most four times the largest tensor: its padded shards, what they are gathered into, the tensor that is put
        # together from that, and the bytes that are hashed.
        assert result["largest"] <= result["sent"] <= 4.1 * result["largest"] < 0.15 * size


@pytest.mark.slow
@pytest.mark.nightly
def test_any_mesh_and_a_critic_are_filled_as_well(tmp_path):
    write(tmp_path / "checkpoint", seed=0, tied=False)
    full = {"trains": "full", "dtype": "float32"}
    kinds = [
        {**full, "mesh": {"tensor": 2}},
        {**full, "mesh": {"shard": 2}, "critic": 1e-4},
        # Adapters are rounded to the dtype of their layers.
        {"trains": "lora", "dtype": "bfloat16"},
    ]
    for lazy, eager in both_ways(tmp_path, kinds, ranks=4):
        assert_same(lazy, eager)
