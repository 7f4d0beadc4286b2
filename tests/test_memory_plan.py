"""`unirl plan` against the bytes that a step of the same recipe holds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import held_memory
import pytest
import torch
from click.testing import CliRunner
from held_memory import held_in_a_step, kept_for_backward
from safetensors.torch import load_file
from small_runs import catalog
from unirl.core.cli import cli
from unirl.core.errors import RecipeError
from unirl.core.recipe.compose import compose
from unirl.loop.run import train
from unirl.models.flux2_klein.tiny import write as write_klein
from unirl.models.sd3.tiny import write as write_sd3
from unirl.models.wan.tiny import write_wan21
from unirl.rewards.clip_family.tiny import write_clip
from unirl.tools.plan import hollow
from unirl.tools.plan.command import plan_data
from unirl.tools.plan.memory_plan import memory_plan
from unirl.tools.plan.prediction import MemoryPlan
from unirl.train_host.sharding import recompute

TOLERANCE = 0.15
"""Accuracy of a plan. Weights, state and trajectories are exact; prompts count with the length of the longest."""

SMALL = ("data.prompts_per_step=4", "data.samples_per_prompt=4", "run.threads=1", "run.device=cpu", "~tracker.report")
QUANTIZED = ("quickstart", *SMALL, "train.replay=serial", "backend.trains=lora", "train.micro_batch_size=3")
RECIPES = {
    "full": ("quickstart", *SMALL),
    "frozen parts": ("quickstart", *SMALL, "+backend.lr_scales={attn: 0.5, transformer_blocks: 0}"),
    "lora": ("quickstart", *SMALL, "backend.trains=lora", "sampling.guidance_scale=2", "train.micro_batch_size=3"),
    "text": ("quickstart-text", *SMALL, "train.logp_mismatch_max=1e9", "train.logp_mismatch_mean=1e9"),
    "copies": (
        "quickstart",
        *SMALL,
        "algorithm.kl_coef=0.01",
        "backend.reference_copy=true",
        "backend.ema.kind=constant",
        "sampling.trajectory_dtype=bfloat16",
        "train.updates_per_step=1",
        "train.replay=serial",
    ),
    "computed again": ("quickstart", *SMALL, "backend.activation_checkpointing=true"),
    "computed again, step by step": (
        *("quickstart", *SMALL, "backend.activation_checkpointing=true", "train.replay=serial"),
        *("backend.trains=lora", "train.micro_batch_size=3"),
    ),
    "int8": (*QUANTIZED, "backend.quantize=int8", "backend.activation_checkpointing=true"),
    "nf4": (*QUANTIZED, "backend.quantize=nf4"),
    "blocks in CPU memory": (*QUANTIZED, "backend.offload_frozen=blocks"),
    "blocks in CPU memory, computed again": (
        *(*QUANTIZED, "backend.offload_frozen=blocks", "backend.activation_checkpointing=true"),
    ),
    "step by step": ("quickstart", *SMALL, "sampling.guidance_scale=2", "train.replay=serial"),
    "step by step, one branch": (
        *("quickstart", *SMALL, "sampling.guidance_scale=2", "train.replay=serial", "train.detach_negative=true"),
    ),
    "critic of steps": ("quickstart-flow-ppo", *SMALL, "backend.critic.warmup_steps=0"),
    "critic of tokens": (
        *("quickstart-text", *SMALL, "algorithm=ppo", "backend.critic.lr=1e-4"),
        *("train.logp_mismatch_max=1e9", "train.logp_mismatch_mean=1e9"),
    ),
    "fake score": ("quickstart-few-steps", *SMALL),
    "fake score of adapters": (
        *("quickstart-few-steps", *SMALL, "backend.trains=lora", "backend.reference_copy=false"),
    ),
    "points": ("quickstart-awm", *SMALL),
    "points, one by one": ("quickstart-awm", *SMALL, "train.replay=serial"),
    "steps together": ("quickstart", *SMALL, "algorithm.ratio=sequence", "train.replay=serial"),
    "edit": ("quickstart-edit", *SMALL),
    "video": ("quickstart-video", *SMALL),
    "video in bf16": (
        *("wan21/flow-grpo", "model.path=FOLDER/wan", "data.train=FOLDER/prompts.txt", "eval=null"),
        *SMALL[:3],
        *("sampling.height=32", "sampling.width=48", "sampling.frames=9", "sampling.max_sequence_length=16"),
        *("backend.mixed_precision=none", "backend.activation_checkpointing=false", "train.logp_mismatch_max=1"),
    ),
}
RAY = ("launcher=ray", "launcher.train_ranks=4")
SEPARATE = ("launcher.placement=separate", "launcher.rollout_workers=2")


@pytest.fixture(scope="module")
def one() -> MemoryPlan:
    """The quickstart in one process, with 192 samples of 16 prompts."""
    return planned("quickstart")


def planned(*words: str, of: MemoryPlan | None = None) -> MemoryPlan:
    plan = compose(words[0], words[1:], catalog=catalog())
    return memory_plan(plan, catalog=catalog(), size=of.size if of else None)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.torchao if name in ("int8", "nf4") else ()) for name in RECIPES],
)
def test_a_step_holds_the_bytes_that_were_planned(name: str, tmp_path: Path) -> None:
    if "video" in name:
        write_wan21(tmp_path / "wan", seed=0)
        (tmp_path / "prompts.txt").write_text("a ring\na disc\na star\na line", encoding="utf-8")
    recipe, *overrides = [word.replace("FOLDER", str(tmp_path)) for word in RECIPES[name]]
    plan = compose(recipe, overrides, catalog=catalog())
    (process,) = memory_plan(plan, catalog=catalog()).processes
    held = held_in_a_step(plan, catalog=catalog())
    # Logits are computed a few rows at a time, again in the backward pass: nothing keeps them.
    items = {item: size for item, size in process.items.items() if item != "logits"}
    assert held.keys() == items.keys()
    for item, size in held.items():
        assert items[item] == pytest.approx(size, rel=TOLERANCE), item
    assert sum(items.values()) == pytest.approx(sum(held.values()), rel=TOLERANCE)


class Block(torch.nn.Module):
    """Saves what it is called with, the first exponential, which the sine takes, and the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).exp().sin().exp()


@pytest.mark.parametrize(("checkpoints", "tensors"), [(False, 5), (True, 4)])
def test_what_blocks_compute_again_is_counted(checkpoints: bool, tensors: int) -> None:
    """Kept of two blocks: x, and two tensors of each. Computed again: what each is called with, and two of the second."""
    net, x = torch.nn.Sequential(Block(), Block()), torch.rand(1000)
    if checkpoints:
        recompute(net)
    with kept_for_backward(net) as kept:
        net(x).square().sum().backward()
    assert kept.peak == tensors * x.nbytes


@pytest.mark.slow
@pytest.mark.nightly
def test_two_ranks_hold_what_was_planned_for_each(tmp_path: Path) -> None:
    """Activations are left out: autograd also keeps the gathered weights, which are freed between."""
    settings = ("backend.defer_gradient_sync=false", "algorithm.kl_coef=0.01", "backend.reference_copy=true")
    words = ("quickstart", *SMALL, *settings)
    store = str(tmp_path / "rank")
    ranks = [
        subprocess.Popen([sys.executable, held_memory.__file__, str(number), store, *words]) for number in range(2)
    ]
    try:
        assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    (process,) = planned(*words, "launcher=ray", "launcher.train_ranks=2").processes
    for number in range(2):
        held = json.loads((tmp_path / f"rank-{number}.json").read_text(encoding="utf-8"))
        assert held.keys() >= {"trained weights", "gradients", "optimizer", "reference", "trajectories", "media"}
        for item in held.keys() - {"activations"}:
            assert process.items[item] == pytest.approx(held[item], rel=TOLERANCE), (number, item)


def test_texts_are_planned_from_configs_and_tokenizer_alone(tmp_path: Path) -> None:
    source = Path(str(vars(compose("quickstart-text", [], catalog=catalog()).only.model.config)["path"]))
    folder = tmp_path / "configs"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    assert planned("quickstart-text", f"model.path={folder}") == planned("quickstart-text")


def test_a_checkpoint_without_weights_is_planned_as_the_whole_one(
    tmp_path: Path, one: MemoryPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = compose("quickstart", catalog=catalog())
    folder = tmp_path / "configs"
    shutil.copytree(str(vars(plan.only.model.config)["path"]), folder)
    removed = [path.unlink() for path in folder.rglob("*.safetensors")]
    assert removed
    assert planned("quickstart", f"model.path={folder}") == one
    assert not list(folder.rglob("*.safetensors")), "the folder is as it was"
    # Weights of other components are copied without their values.
    for name in ("vae", "text_encoder"):
        (source,) = (Path(str(vars(plan.only.model.config)["path"])) / name).glob("*.safetensors")
        shutil.copyfile(source, folder / name / source.name)
    monkeypatch.setattr(hollow, "COPIED_BYTES", 2**16)
    assert planned("quickstart", f"model.path={folder}") == one
    (folder / "transformer/config.json").write_text('{"patch_size": "two"}', encoding="utf-8")
    with pytest.raises(RecipeError, match=r"has no weights, and diffusers\.SD3Transformer2DModel cannot be built"):
        planned("quickstart", f"model.path={folder}")


def test_ranks_share_weights_and_samples_but_not_encoders(one: MemoryPlan) -> None:
    alone = one.processes[0].items
    (process,) = planned("quickstart", *RAY, "backend.defer_gradient_sync=false", of=one).processes
    assert process.count == 4
    for name in ("trained weights", "gradients", "optimizer", "trajectories", "media"):
        assert process.items[name] * 4 == alone[name], name
    for name in ("encoders and decoder", "frozen weights"):
        assert process.items[name] == alone[name], "buffers of positions are all that is frozen here"
    # 192 samples on 4 ranks, in two updates.
    assert process.items["activations"] * 4 == alone["activations"]
    (whole,) = planned("quickstart", *RAY, of=one).processes
    assert whole.items["gradients"] == alone["gradients"], "of all parameters, until the end of an update"
    (hybrid,) = planned("quickstart", *RAY, "backend.mesh.shard=2", of=one).processes
    assert hybrid.items["optimizer"] * 2 == alone["optimizer"]


def test_rollout_workers_have_whole_weights_and_room_for_an_update(one: MemoryPlan) -> None:
    on_device = (*RAY, *SEPARATE, "launcher.carrier=collective")
    train, rollout = (result := planned("quickstart", *on_device, of=one)).processes
    assert "encoders and decoder" not in train.items
    assert (rollout.role, rollout.count) == ("rollout", 2)
    # Trained parameters are sent in fp32, like the frozen buffers beside them.
    assert result.sync_bytes == rollout.items["weight sync"] == rollout.items["weights"] == one.size.weight_bytes
    assert rollout.items["trajectories"] * 2 == one.processes[0].items["trajectories"]
    # Shared memory, Ray and files are on the host, which is the device of a run on CPUs.
    for words, is_counted in (((), False), (("run.device=cpu",), True)):
        (_, rollout) = planned("quickstart", *RAY, *SEPARATE, *words, of=one).processes
        assert ("weight sync" in rollout.items) == is_counted


def test_rewards_are_counted_on_the_devices_that_they_use(one: MemoryPlan, tmp_path: Path) -> None:
    """All elements of the checkpoint in the dtype of the reward; the quickstart's own reward has none."""
    folder, head = tmp_path / "clip", tmp_path / "head.pth"
    write_clip(folder, seed=0)
    elements = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    torch.save({"layers.0.weight": torch.ones(7, 11)}, head)
    words = ("quickstart", "+reward@reward.pick=aesthetic", f"reward.pick.path={folder}", f"reward.pick.head={head}")
    held = 4 * (elements + 7 * 11)
    (alone,) = planned(*words, of=one).processes
    assert alone.items == one.processes[0].items | {"reward.pick": held}
    # By default a reward worker beside each train rank, on its device.
    train, reward = planned(*words, *RAY, of=one).processes
    assert (reward.role, reward.count, reward.shares_device, reward.items) == ("reward", 4, True, {"reward.pick": held})
    assert train.items["reward.pick"] == held
    (_, pair, _) = planned(*words, *RAY, "launcher.placement=colocate", of=one).processes
    assert (pair.role, pair.items["reward.pick"]) == ("rollout", held)
    half = 2 * elements + 4 * 7 * 11
    own = (*RAY, "launcher.reward_gpus=0.5", "launcher.reward_workers=3", "reward.pick.dtype=bfloat16")
    train, reward = planned(*words, *own, of=one).processes
    assert (reward.count, reward.shares_device, reward.items) == (3, False, {"reward.pick": half})
    assert "reward.pick" not in train.items
    (train,) = planned(*words, *RAY, "launcher.reward_gpus=0", of=one).processes
    assert "reward.pick" not in train.items, "on the CPU"
    result = planned("quickstart", "+reward@reward.pick=pickscore", "reward.pick.path=nobody/nothing", of=one)
    assert result.processes == one.processes
    assert "weights of reward.pick, which cannot be read on this machine" in result.notes


def test_what_does_not_fit_beside_a_train_rank_is_named_by_its_key(one: MemoryPlan, tmp_path: Path) -> None:
    write_clip(tmp_path, seed=0)
    words = ("quickstart", "+reward@reward.pick=clipscore", f"reward.pick.path={tmp_path}", *RAY)
    result = planned(*words, of=one)
    problems = result.overfull(result.processes[1].total - 1)
    assert [problem.partition(":")[0] for problem in problems] == ["train", "reward"]
    assert problems[0].endswith("launcher.reward_gpus for rewards on GPUs of their own or backend.trains=lora.")
    assert "Largest: CUDA contexts 1.0 GiB, reward.pick" in problems[1]


def test_what_is_no_tensor_of_the_run_is_estimated_on_accelerators(one: MemoryPlan) -> None:
    """Half a GiB for the context of each process on a device, one for NCCL where ranks train together, and a tenth of
    the activations for the allocator."""
    gib, kept = 2**30, one.processes[0].items["activations"]
    assert one.processes[0].estimates == {"CUDA contexts": gib // 2, "allocator reserve": round(kept / 10)}
    train, rollout = planned("quickstart", *RAY, "launcher.placement=colocate", of=one).processes
    assert train.estimates == {
        "CUDA contexts": 2 * gib // 2,
        "communication": gib,
        "allocator reserve": round(kept / 4 / 10),
    }
    assert rollout.estimates == {"CUDA contexts": 2 * gib // 2}
    assert train.total == sum(train.items.values()) + sum(train.estimates.values())
    assert planned("quickstart", "run.device=cpu", of=one).processes[0].estimates == {}


ENGINE = ("quickstart-text", "engine=vllm", "engine.gpu_memory=0.5", "engine.dtype=bfloat16", "engine.kv_cache_mb=3")


def test_an_external_engine_has_weights_in_its_dtype_and_takes_its_share(tmp_path: Path) -> None:
    """Its process is beside the one that trains, or beside the rollout worker that feeds it."""
    device = 2**33
    plan = planned(*ENGINE)
    (train,) = plan.processes
    elements, own = plan.size.trained_elements, plan.size.weight_bytes - plan.size.trained_bytes
    assert train.items["engine weights"] == pytest.approx(2 * elements + own / 2)
    assert train.items["engine cache"] == 3 * 2**20
    assert train.estimates["CUDA contexts"] == 2 * 2**29
    held = train.items["engine weights"] + train.items["engine cache"]
    assert train.on_device(device) == train.total - held + device // 2
    assert train.on_device(2) == train.total, "no less than its weights"
    ranks, rollout = planned(*ENGINE, *RAY, *SEPARATE, of=plan).processes
    assert not {"engine weights", "weights"} & ranks.items.keys() and ranks.engine_share == 0
    assert rollout.items["engine weights"] == train.items["engine weights"] and rollout.engine_share == 0.5
    assert "Largest: CUDA contexts 1.0 GiB" in plan.overfull(2**20)[0]


@pytest.mark.parametrize(("words", "waves"), [((), 1), (("engine.max_num_seqs=100",), 3)])
def test_decoding_reads_weights_for_each_token_and_keys_for_each_before(words: tuple[str, ...], waves: int) -> None:
    """256 completions of n tokens after a prompt of p: n reads of the weights for each batch, and of a completion's cache
    p + 1 to p + n tokens, each 2 (keys and values) x layers x heads x width, in bf16."""
    plan = planned("quickstart-text", "engine=vllm", "engine.dtype=float32", "backend.mixed_precision=bf16", *words)
    chosen = compose("quickstart-text", catalog=catalog())
    config = json.loads((Path(str(vars(chosen.only.model.config)["path"])) / "config.json").read_text(encoding="utf-8"))
    new = vars(chosen.only.sampling)["max_new_tokens"]
    prompt = plan.size.row_elements - new
    token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2
    cached = sum(range(prompt + 1, prompt + new + 1))
    assert plan.samples == 256
    assert plan.decode_bytes == waves * new * plan.size.weight_bytes + 256 * cached * token
    assert planned("quickstart").decode_bytes == 0


@pytest.mark.parametrize("model", ["sd3", "flux2-klein"])
def test_mixed_precision_keeps_what_the_module_in_that_dtype_keeps(model: str, tmp_path: Path) -> None:
    """Its inputs are cast as its weights are."""
    {"sd3": write_sd3, "flux2-klein": write_klein}[model](tmp_path / "model", seed=0)
    (tmp_path / "prompts.txt").write_text("a ring", encoding="utf-8")
    places = (f"{model}/flow-grpo", f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 'prompts.txt'}")
    sizes = ("sampling.height=64", "sampling.width=64", "sampling.max_sequence_length=16")
    mixed, whole = (
        planned(*places, *sizes, "backend.mixed_precision=bf16", f"model.dtype={dtype}").size
        for dtype in ("float32", "bfloat16")
    )
    assert (mixed.saved_bytes, mixed.kept_bytes) == (whole.saved_bytes, whole.kept_bytes)


def test_idle_encoders_and_decoder_take_the_place_of_activations(one: MemoryPlan) -> None:
    """On the device at one time: the encoders or the decoder, and no activations of training then."""
    size, alone, parts = one.size, one.processes[0].items, "encoders or decoder"
    # The miniature's decoder is the larger one.
    most, least = size.decode_bytes, size.encode_bytes
    assert alone["activations"] > most > least > 0
    (process,) = planned("quickstart", "engine.offload_idle=true", of=one).processes
    assert process.items == {name: held for name, held in alone.items() if name != "encoders and decoder"}
    # And with activations that are smaller.
    words = ("quickstart", "train.micro_batch_size=1", "train.replay=serial", "backend.activation_checkpointing=true")
    (small,) = planned(*words).processes
    result = planned(*words, "engine.offload_idle=true")
    held = small.items["activations"]
    assert held < most and "logits" not in small.items
    assert result.processes[0].items[parts] == most - held
    assert small.total - result.processes[0].total == least + held
    assert any("CPU memory: encoders and decoder are there while they are idle" in note for note in result.notes)
    (_, rollout) = planned("quickstart", *RAY, *SEPARATE, "engine.offload_idle=true", of=one).processes
    assert rollout.items[parts] == most


def test_copies_that_are_written_beside_training_are_counted_where_they_are(one: MemoryPlan) -> None:
    """Weights, an average and two moments in fp32: in the memory of a CPU, or in that of the machine beside a GPU."""
    words = ("quickstart", "run.save_async=true", "backend.ema.kind=constant", "backend.reference_copy=true")
    expected = 4 * 4 * one.size.trained_elements
    (process,) = planned(*words, "run.device=cpu", of=one).processes
    assert process.items["copies to save"] == expected
    on_device = planned(*words, of=one)
    assert "copies to save" not in on_device.processes[0].items
    assert f"a copy of what it saves, {expected / 2**30:.2g} GiB each train process" in " ".join(on_device.notes)
    assert not any("save_async" in note for note in one.notes)


def test_activation_checkpointing_keeps_less_and_computes_more(one: MemoryPlan) -> None:
    again = planned("quickstart", "backend.activation_checkpointing=true", of=one)
    rows, each = 96, one.size.kept_bytes + one.size.block_bytes
    assert again.processes[0].items["activations"] == rows * each
    assert again.flops.train * 3 == one.flops.train * 4


def test_weights_stay_gathered_where_the_device_has_room(one: MemoryPlan) -> None:
    """Full weights in fp32 on four ranks. A sixteenth of the device is the bound of `auto`."""
    size, room = one.size, 16 * 4 * one.size.elements
    least = 4 * (size.root_elements + 2 * size.block_elements)
    for setting, device_bytes, expected in (
        ("auto", 0, least),
        ("auto", room - 1, least),
        ("auto", room, 4 * size.elements),
        ("always", room, least),
        ("never", 0, 4 * size.elements),
    ):
        plan = compose("quickstart", [*RAY, f"backend.reshard_after_forward={setting}"], catalog=catalog())
        result = memory_plan(plan, catalog=catalog(), size=size, device_bytes=device_bytes)
        assert result.processes[0].items["gathered blocks"] == expected
        assert any("stay gathered" in note for note in result.notes) == (setting == "auto" and not device_bytes)


SCOUTS = ("data.scouts.samples_per_prompt=24", "data.scouts.num_inference_steps=4")
OFFLOADED = ("backend.trains=lora", "backend.offload_frozen=blocks")


def test_offloaded_blocks_are_pinned_and_copied_with_each_pass(one: MemoryPlan) -> None:
    """192 samples in two updates of one micro-batch each, 5 of 10 steps scored, each step alone: on a GPU."""
    size = one.size
    plan = planned("quickstart", *OFFLOADED, of=one)
    whole = planned("quickstart", "backend.trains=lora", of=one)
    assert plan.pinned_bytes == size.blocks_bytes and whole.pinned_bytes == 0 and whole.bus_bytes is None
    items, others = plan.processes[0].items, whole.processes[0].items
    assert items["blocks on the device"] == 2 * size.largest_block_bytes < size.blocks_bytes
    assert items["frozen weights"] == others["frozen weights"] - size.blocks_bytes
    assert plan.flops == whole.flops and plan.processes[0].total < whole.processes[0].total
    # The first update's own forward pass gives its old log-probs.
    forwards = {"generate": 10, "old_log_probs": 5, "reference": 0, "train": 2 * 5 * 2}
    assert plan.bus_bytes is not None
    assert vars(plan.bus_bytes) == {phase: number * size.blocks_bytes for phase, number in forwards.items()}
    for words, expected in {
        ("engine.forward_batch=50",): {**forwards, "generate": 4 * 10},
        ("train.micro_batch_size=40",): {**forwards, "old_log_probs": 3 * 5, "train": 2 * 3 * 5 * 2},
        ("train.replay=stacked",): {**forwards, "old_log_probs": 1, "train": 2 * 2},
        ("train.old_log_probs=replay",): {**forwards, "old_log_probs": 2 * 5},
        ("train.old_log_probs=engine",): {**forwards, "old_log_probs": 0},
        ("algorithm.kl_coef=0.1",): {**forwards, "reference": 2 * 5},
        SCOUTS: {**forwards, "generate": 10 + 4},
        # 192 exact samples and 384 scouts.
        (*SCOUTS, "engine.forward_batch=100"): {**forwards, "generate": 2 * 10 + 4 * 4},
    }.items():
        bus = planned("quickstart", *OFFLOADED, *words, of=one).bus_bytes
        assert bus is not None
        assert vars(bus) == {phase: number * size.blocks_bytes for phase, number in expected.items()}, words


def test_guidance_adds_passes_unless_its_branches_are_batched() -> None:
    for mode, rollout, words, trained in (
        ("two-pass", 2, (), 2 * 2),
        ("batched", 1, (), 1 + 1),
        # Each branch by itself, and the positive one backward.
        ("batched", 1, ("train.detach_negative=true",), 2 + 1),
    ):
        settings = ("sampling.guidance_scale=2", f"sampling.guidance_mode={mode}", *OFFLOADED, *words)
        plan = planned("quickstart", *settings)
        assert plan.bus_bytes is not None
        assert plan.bus_bytes.generate == 10 * rollout * plan.size.blocks_bytes
        assert plan.bus_bytes.train == 2 * 5 * trained * plan.size.blocks_bytes, mode


def test_the_bus_bounds_a_phase_where_it_is_slower_than_the_operations(one: MemoryPlan) -> None:
    plan = planned("quickstart", *OFFLOADED, of=one)
    fast, slow = (plan_data(plan, speed=1e15, bus=bus) for bus in (1e15, 1e6))
    assert plan.bus_bytes is not None
    assert fast["seconds"]["train"] == pytest.approx(plan.flops.train / 1e15)
    assert slow["seconds"] == slow["bus_seconds"]
    assert slow["seconds"]["train"] == pytest.approx(plan.bus_bytes.train / 1e6)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ((), 1),
        (("run.device=cpu",), 5),
        (("train.replay=stacked",), 5),
        (("train.replay=serial", "run.device=cpu"), 1),
        (("algorithm.ratio=sequence",), 5),
    ],
)
def test_a_graph_has_one_step_unless_the_loss_couples_them(
    one: MemoryPlan, settings: tuple[str, ...], steps: int
) -> None:
    plan = planned("quickstart", *settings, of=one)
    assert plan.processes[0].items["activations"] == 96 * steps * one.size.saved_bytes


def test_operations_follow_samples_steps_and_branches(one: MemoryPlan) -> None:
    row = 192 * one.size.flops
    # Of two updates, the second's old log-probs are recomputed.
    assert (one.flops.generate, one.flops.old_log_probs, one.flops.train) == (10 * row, 2.5 * row, 15 * row)
    guided = planned("quickstart", "sampling.guidance_scale=2", "algorithm.kl_coef=0.1", "backend.reference_copy=true")
    assert (guided.flops.generate, guided.flops.reference, guided.flops.train) == (20 * row, 10 * row, 30 * row)
    detached = planned("quickstart", "sampling.guidance_scale=2", "train.detach_negative=true")
    assert detached.flops.train == (15 + 5) * row


def test_what_trains_beside_the_policy_takes_operations_of_its_own(one: MemoryPlan) -> None:
    """In forwards of all that is trained on, F: a critic takes one for the values, and three for each of its steps; a
    fake score one in the policy's loss, and in each of its steps one of the student and three of its own."""
    forward = one.size.flops * one.samples * one.size.train_rows
    assert one.flops.train == 3 * forward
    words = (
        "algorithm=flow-ppo",
        "backend.critic.lr=1e-4",
        "backend.critic.steps_per_update=2",
        "advantage.scope=group",
    )
    judged = planned("quickstart", *words, of=one)
    assert judged.flops.train == (3 + 1 + 2 * 3) * forward
    own = planned("quickstart-few-steps")
    assert own.size.train_rows == 1, "points that the loss chooses"
    points, steps = 1, 5
    forward = own.size.flops * own.samples * points
    assert own.flops.train == (3 + 1 + steps * (1 + 3)) * forward
    assert own.flops.reference == forward, "the teacher"


def test_a_critic_is_a_copy_of_the_model_and_a_fake_score_one_of_what_trains() -> None:
    """Weights, gradients and two moments of every parameter in fp32, with LoRA as well; against weights and moments of
    the adapters."""
    critic = planned("quickstart-flow-ppo", "backend.trains=lora")
    (process,) = critic.processes
    elements = critic.size.trained_elements
    assert (process.items["critic"], process.items["critic gradients"]) == (12 * elements, 4 * elements)
    assert any("activations of the critic" in note for note in critic.notes)
    fake = planned("quickstart-few-steps", "backend.trains=lora", "backend.reference_copy=false")
    (process,) = fake.processes
    assert process.items["fake score"] == 12 * fake.size.adapter_elements
    assert not any("activations of the critic" in note for note in fake.notes)


def test_a_run_is_told_the_operations_of_each_device(one: MemoryPlan) -> None:
    """Those of the plan, over the devices that compute them; none where nothing is planned. Nothing random is drawn."""
    before = torch.get_rng_state()
    for words, ranks, rollout in (((), 1, 1), (RAY, 4, 4), ((*RAY, *SEPARATE), 4, 2)):
        result = catalog().step_flops(compose("quickstart", words, catalog=catalog()))
        rest = one.flops.total - one.flops.generate
        assert result == pytest.approx({"generate": one.flops.generate / rollout, "train": rest / ranks})
    assert torch.equal(torch.get_rng_state(), before)
    assert catalog().step_flops(compose("quickstart-enhancer", catalog=catalog())) == {}


@pytest.mark.slow
@pytest.mark.nightly
def test_a_step_logs_the_rates_of_its_phases_and_the_report_shows_them(one: MemoryPlan, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("run.max_steps=1", "run.peak_tflops=0.5", "data.eval=''", f"run.dir={folder}")
    train(compose("quickstart", words, catalog=catalog()), catalog=catalog())
    (event,) = [
        event
        for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
        if (event := json.loads(line))["kind"] == "step"
    ]
    metrics, seconds = event["metrics"], event["phases"]
    trained = (one.flops.total - one.flops.generate) / 1e12
    assert metrics["perf/train_tflops"] == pytest.approx(trained / seconds["train"])
    assert metrics["perf/train_mfu"] == pytest.approx(trained / seconds["train"] / 0.5)
    # The seconds of a rollout include what is between its phases.
    assert metrics["perf/generate_tflops"] == pytest.approx(one.flops.generate / 1e12 / seconds["generate"], rel=0.2)
    # 192 images of 3 x 64 x 64 at 8 bits.
    assert metrics["perf/media_bytes"] == 192 * 3 * 64 * 64
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Rates and traffic, mean of the steps" in page and "perf/train_mfu" in page


def test_a_checkpoint_has_weights_averages_and_moments_and_no_reference(one: MemoryPlan) -> None:
    """Of W parameters in fp32: weights, two moments and each average; besides elements, 1850 bytes for each tensor."""
    size = one.size
    weights, tensors = size.trained_elements, size.tuned_tensors
    assert one.checkpoint_bytes == 12 * weights + 4 * tensors + 1850 * 4 * tensors
    copies = ("backend.reference_copy=true", "backend.ema.kind=constant", "algorithm.kl_coef=0.01")
    assert (
        planned("quickstart", *copies, of=one).checkpoint_bytes - one.checkpoint_bytes == 4 * weights + 1850 * tensors
    )
    # Each rank writes its shards; step counts are not sharded.
    ranks = planned("quickstart", *RAY, of=one)
    assert ranks.checkpoint_bytes - one.checkpoint_bytes == 1850 * 3 * 3 * tensors
    for words, most in (
        (("run.max_steps=10", "run.save_every=2"), 3),
        (("run.max_steps=10", "run.save_every=2", "run.keep=0"), 5),
        (("run.max_steps=10", "run.save_every=9"), 2),
        (("run.max_steps=10", "run.save_every=0"), 1),
    ):
        assert planned("quickstart", *words, of=one).num_checkpoints == most, words


SAVED = {
    "full": ("quickstart",),
    "lora": ("quickstart", "backend.trains=lora"),
    "text": ("quickstart-text", "advantage.constant_reward=skip", "backend.lagged.kind=linear"),
    "copies": ("quickstart", "algorithm.kl_coef=0.01", "backend.reference_copy=true", "backend.ema.kind=constant"),
    "critic": ("quickstart-flow-ppo", "backend.critic.warmup_steps=0"),
    "fake score": ("quickstart-few-steps", "backend.trains=lora", "backend.reference_copy=false"),
}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_is_as_large_as_planned(name: str, tmp_path: Path) -> None:
    """Elements are counted exactly; the rest, by a measured constant, is within a hundredth of the whole."""
    recipe, *words = SAVED[name]
    words += [*SMALL, "eval=null", "run.max_steps=1", f"run.dir={tmp_path / 'run'}"]
    plan = compose(recipe, words, catalog=catalog())
    train(plan, catalog=catalog(), overrides=words)
    files = [path for path in (tmp_path / "run/checkpoints/step-000001").rglob("*") if path.is_file()]
    planned_bytes = memory_plan(plan, catalog=catalog()).checkpoint_bytes
    assert planned_bytes == pytest.approx(sum(path.stat().st_size for path in files), rel=0.01)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("quickstart-enhancer",), "stages: got rewrite, image with 2 models, expected one that trains"),
        (
            ("quickstart", "launcher=ray", "launcher.train_ranks=2", "backend.mesh.tensor=2"),
            "backend: 'fsdp2' does not state what it holds",
        ),
        (("quickstart-vl",), "model: 'qwen3-vl' reads images with its texts"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_cannot_be_planned_is_refused(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        planned(*words)


def test_the_command_says_what_does_not_fit_and_ends_with_1() -> None:
    result = CliRunner().invoke(cli, ["plan", "quickstart", "run.device=cpu", "--device-memory", "200MiB", "--json"])
    assert result.exit_code == 1, result.output
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem.startswith("train: needs 0.3 GiB of each device, expected at most 0.2 GiB. Largest: activations 0.3")
    shown = CliRunner().invoke(cli, ["plan", "quickstart", "run.save_every=9", "run.max_steps=90"])
    assert "checkpoint: 5.8 MiB; 3 on disk at most: 17.3 MiB" in shown.output


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--device-memory", "80 apples", "expected a size such as 80GiB"),
        ("--device-memory", "9" * 400, "expected a size such as 80GiB"),
        *((option, "0", "x>0") for option in ("--tflops", "--utilisation", "--bandwidth", "--bus")),
    ],
)
def test_a_device_that_cannot_exist_is_refused(option: str, value: str, says: str) -> None:
    result = CliRunner().invoke(cli, ["plan", "quickstart", option, value])
    assert result.exit_code == 2 and option in result.output and says in result.output


def test_a_plan_without_readable_prompts_says_so(one: MemoryPlan, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": ', encoding="utf-8")
    for path in (tmp_path / "absent.jsonl", broken):
        (note, *_) = planned("quickstart", f"data.train={path}", of=one).notes
        assert note.startswith("lengths of your prompts, which could not be read (") and path.name in note
    assert not any("your prompts" in note for note in one.notes)
