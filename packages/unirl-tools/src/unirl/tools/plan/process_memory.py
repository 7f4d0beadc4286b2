"""Formulas of what each process of a plan holds; docs/explanation/planning.md explains them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from unirl.core.specs.capability import Cap
from unirl.core.specs.memory import GATHERED_SHARE, Processes, TrainingMemory
from unirl.core.specs.part_config import LauncherConfig
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig

from .block_copies import copied_bytes
from .prediction import MemoryPlan, Process, StepTime
from .reward_size import RewardMemory
from .saved_state import FP32, SavedState
from .step_flops import step_flops

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

    from .model_size import ModelSize

__all__ = ["ProcessMemory", "processes_of"]

CONTEXT, COMMUNICATION = 2**29, 2**30
"""Estimates, in bytes: the CUDA context and the loaded kernels of a process, and NCCL's buffers of a train rank."""
RESERVE = 0.1
"""Estimate: what the allocator keeps beside activations, as a share of them."""


def processes_of(plan: Plan) -> Processes:
    """Number of processes that a plan's launcher starts; one without a launcher."""
    return _launcher_config(plan).processes


def _launcher_config(plan: Plan) -> LauncherConfig:
    config = plan.launcher.config if plan.launcher is not None else LauncherConfig()
    assert isinstance(config, LauncherConfig), "the catalog checks the base class of configs"
    return config


class ProcessMemory:
    """Memory of the processes of a plan with one stage that trains."""

    def __init__(
        self,
        plan: Plan,
        stage: Stage,
        memory: TrainingMemory,
        size: ModelSize,
        separates_steps: bool,
        device_bytes: int,
    ) -> None:
        """separates_steps: the algorithm's.  device_bytes: as `memory_plan` takes it."""
        self._plan, self._stage, self._memory, self._size = plan, stage, memory, size
        self._separates_steps, self._device_bytes = separates_steps, device_bytes
        self._processes = processes_of(plan)
        self._rewards = RewardMemory(plan, stage, _launcher_config(plan).reward_processes(plan))
        self._ranks = self._processes.train
        self._shards = memory.shard_ranks or self._ranks
        self._samples = plan.data.prompts_per_step * plan.rows_per_prompt(stage)
        self._per_rank = math.ceil(self._samples * memory.row_ranks / self._ranks)
        self._is_lora = memory.lora_rank > 0
        self._offloads = bool(vars(stage.engine.config).get("offload_idle"))
        """Whether encoders and decoder are in CPU memory while they are idle; only for in-process engines."""
        self._on_accelerator = plan.run.device.partition(":")[0] != "cpu"
        self._pinned = size.blocks_bytes if memory.offloads_blocks else 0
        engine = stage.engine
        self._is_external = not engine.spec.reads_weights and not engine.spec.samples
        self._engine_share = float(vars(engine.config).get("gpu_memory", 0.0)) if self._is_external else 0.0
        # A loss that reads no trajectory chooses its own points.
        points = 1 if stage.algorithm is None else vars(stage.algorithm.config).get("num_points", 1)
        self._train_rows = size.train_rows * points
        self._elements = size.adapter_elements if self._is_lora else size.trained_elements - size.frozen_elements
        self._judging = size.critic_elements if memory.auxiliary == "critic" else 0
        """Parameters of a critic. A fake score has as many as train."""
        self._saved = SavedState(
            memory=memory,
            elements=self._elements,
            tensors=size.tuned_tensors,
            auxiliary=self._elements if memory.auxiliary == "fake score" else self._judging,
            auxiliary_tensors=size.tuned_tensors if memory.auxiliary == "fake score" else size.critic_tensors,
            shards=self._shards,
        )

    def plan(self, *unread: str) -> MemoryPlan:
        processes = [self._train()]
        if self._processes.rollout:
            rollout = self._rollout()
            if rollout.shares_device and Cap.SLEEP not in self._stage.engine.spec.capabilities:
                engine = {name: size for name, size in rollout.items.items() if name.startswith("engine")}
                rest = rollout.total - sum(engine.values())
                items = {**processes[0].items, **engine, **({"rollout worker on the device": rest} if rest else {})}
                processes = [replace(processes[0], items=items, engine_share=rollout.engine_share)]
            processes.append(rollout)
        notes = [
            *unread,
            "temporaries of operators",
            "activations of sampling, text encoders, VAE and rewards, which keep nothing for a backward pass",
        ]
        if self._offloads:
            idle = self._size.encode_bytes + self._size.decode_bytes
            notes.append(
                f"CPU memory: encoders and decoder are there while they are idle, {idle / 2**30:.2g} GiB each process"
            )
        if self._plan.run.save_async and self._on_accelerator:
            notes.append(
                "CPU memory: run.save_async keeps a copy of what it saves, "
                f"{self._saved.staged_bytes / 2**30:.2g} GiB each train process"
            )
        if self._is_external and not self._engine_share:
            notes.append(f"buffers that engine {self._stage.engine.name!r} allocates itself")
        if self._shards > 1 and self._memory.keeps_gathered == "auto" and not self._device_bytes:
            notes.append("weights that stay gathered on devices large enough for it; give --device-memory")
        if (count := self._processes.reference) and self._stage.needs.reference == "policy":
            items = {"weights": self._size.weight_bytes, **self._samples_of(count)}
            processes.append(Process(role="reference", count=count, items=items))
        if self._judging and self._is_lora:
            notes.append("activations of the critic, which trains all of its weights")
        if self._stage.needs.reward == "differentiable":
            notes.append("more than one step or draw per sample in the graph of backpropagated rewards")
        for pool, items in self._rewards.workers():
            is_beside = pool.device == "shared"
            processes.append(Process(role="reward", count=pool.count, items=items, shares_device=is_beside))
        notes += self._rewards.notes()
        return MemoryPlan(
            size=self._size,
            processes=tuple(replace(each, estimates=self._estimates(each, processes)) for each in processes),
            samples=self._samples,
            sync_bytes=self._update_bytes() if self._processes.rollout else 0,
            checkpoint_bytes=self._saved.checkpoint_bytes,
            num_checkpoints=self._num_checkpoints(),
            flops=step_flops(
                stage=self._stage,
                memory=self._memory,
                size=self._size,
                samples=self._samples,
                train_rows=self._train_rows,
                further=self._further,
            ),
            decode_bytes=self._decode_bytes(),
            pinned_bytes=self._pinned,
            bus_bytes=self._bus_bytes() if self._pinned else None,
            notes=tuple(notes),
        )

    def _train(self) -> Process:
        size, memory = self._size, self._memory
        trained = FP32 * self._elements / self._shards
        others = size.weight_bytes if self._is_lora else size.weight_bytes - size.trained_bytes
        others += FP32 * size.frozen_elements
        wraps = (self._ranks > 1 or bool(memory.compute_dtype)) and not memory.offloads_blocks
        items: dict[str, float] = {
            "blocks on the device": min(2 * size.largest_block_bytes, self._pinned),
            "frozen weights": (others - self._pinned - size.buffer_bytes) / self._shards + size.buffer_bytes,
            "trained weights": trained,
            "gradients": FP32 * self._elements if memory.whole_gradients and self._ranks > 1 else trained,
            "optimizer": memory.optimizer_bytes * self._elements / self._shards,
            **dict.fromkeys(memory.copies, trained),
            **self._auxiliary(),
            "copies to save": 0 if self._on_accelerator or not self._plan.run.save_async else self._saved.staged_bytes,
            "gathered blocks": self._gathered() if wraps else 0,
            "activations": self._activations(),
            "logits": min(size.most_head_bytes, self._rows() * size.head_bytes),
        }
        share = 0.0
        if not self._processes.rollout:
            items |= self._parts(instead_of=items["activations"] + items["logits"])
            if self._is_external and not vars(self._stage.engine.config).get("sleep_mode"):
                items |= self._engine()
                share = self._engine_share
        elif self._stage.needs.reward == "differentiable":
            items["decoder"] = size.decode_bytes
        if self._processes.rollout:
            # Gathered shards, the whole tensor and the bytes that are hashed, and a bucket on its way.
            bucket = min(self._processes.bucket_bytes, self._update_bytes())
            items["weight sync"] = 4 * FP32 * size.largest_elements + bucket
        items |= self._samples_of(self._ranks / memory.row_ranks) | self._rewards.on_train_device()
        return Process(role="train", count=self._ranks, items=_whole(items), engine_share=share)

    def _auxiliary(self) -> dict[str, float]:
        """A critic or a fake score. The fake score reuses the gradients of the policy's parameters."""
        memory = self._memory
        if memory.auxiliary == "fake score":
            return {"fake score": (FP32 + memory.optimizer_bytes) * self._elements / self._shards}
        if memory.auxiliary == "critic":
            gradients = 1 if memory.whole_gradients and self._ranks > 1 else 1 / self._shards
            return {
                "critic": (FP32 + memory.optimizer_bytes) * self._judging / self._shards,
                "critic gradients": FP32 * self._judging * gradients,
            }
        return {}

    def _rollout(self) -> Process:
        size, count = self._size, self._processes.rollout
        weights = size.weight_bytes if self._is_lora else size.weight_bytes - size.trained_bytes
        # As updates have them: trained parameters in fp32.
        own = {"weights": weights + (0 if self._is_lora else FP32 * size.trained_elements)}
        items: dict[str, float] = {
            **(self._engine() if self._is_external else own),
            # An update is collected before it is applied.
            "weight sync": self._update_bytes()
            if not self._on_accelerator or (self._processes.receives_on_device and not self._is_external)
            else 0,
            **self._parts(),
            **self._samples_of(count),
            **(self._rewards.beside() if self._processes.is_colocated else {}),
        }
        return Process(
            role="rollout",
            count=count,
            items=_whole(items),
            shares_device=self._processes.is_colocated,
            engine_share=self._engine_share,
        )

    def _engine(self) -> dict[str, float]:
        """Memory of an external engine: its weights, in its dtype, and the caches that its settings name."""
        config = vars(self._stage.engine.config)
        return {"engine weights": self._engine_weights(), "engine cache": 2**20 * config.get("kv_cache_mb", 0)}

    def _engine_weights(self) -> float:
        """Weights that the engine computes with, on each device that it splits them over."""
        size, config = self._size, vars(self._stage.engine.config)
        dtype, devices = str(config.get("dtype", "auto")), int(config.get("tensor_parallel", 1))
        if not self._is_external or dtype == "auto" or not size.trained_elements:
            return size.weight_bytes / devices
        return size.weight_bytes / devices * getattr(torch, dtype).itemsize * size.trained_elements / size.trained_bytes

    def _estimates(self, process: Process, processes: Sequence[Process]) -> dict[str, int]:
        """See `Process.estimates`."""
        if not self._on_accelerator:
            return {}
        train = processes[0]
        on_device = [process]
        if process is train or process.shares_device:
            on_device = [train, *(each for each in processes if each.shares_device)]
        generates = "rollout" if self._processes.rollout else "train"
        contexts = len(on_device) + sum(self._is_external and each.role == generates for each in on_device)
        result = {"CUDA contexts": contexts * CONTEXT}
        if process is train and self._ranks > 1:
            result["communication"] = COMMUNICATION
        if held := round(RESERVE * process.items.get("activations", 0)):
            result["allocator reserve"] = held
        return result

    def _parts(self, *, instead_of: float = 0) -> dict[str, float]:
        """Memory of the parts besides `trainable` that an engine uses. An external engine loads them in its own
        process; a part that it names is in this process as well, to check what it encodes.

        On an accelerator the encoders in this process are in CPU memory once they have been compared.

        instead_of: bytes that are held only while nothing is encoded or decoded, which is when idle parts are not here.
        """
        spec, size = self._stage.engine.spec, self._size
        parts = {"encode": size.encode_bytes, "decode": size.decode_bytes}
        if self._offloads:
            # Images among the inputs pass through the VAE.
            encoding = size.encode_bytes + (size.decode_bytes if self._stage.model.spec.inputs else 0)
            return {"encoders or decoder": max(encoding, size.decode_bytes, instead_of) - instead_of}
        own = set(spec.parts_of(self._stage.model.spec)) - ({"encode"} if self._on_accelerator else set())
        again = sum(parts[part] for part in own) if not spec.reads_weights else 0
        return {"encoders and decoder": size.encode_bytes + size.decode_bytes + again}

    def _samples_of(self, holders: float) -> dict[str, float]:
        """Memory of the samples of a step, divided among this many processes."""
        sampling, size = self._stage.sampling, self._size
        rows, prompts = (math.ceil(count / holders) for count in (self._samples, self._plan.data.prompts_per_step))
        items: dict[str, float] = {"trajectories": rows * size.stored_bytes}
        if isinstance(sampling, LatentSamplingConfig):
            # The negative prompt is the same for all.
            items["conditions"] = (prompts + sampling.is_guided) * size.condition_bytes
            pixels = 3 * sampling.frames * sampling.height * sampling.width
            drawn = [math.ceil(self._plan.data.prompts_per_step * count / holders) for count, _ in self._further]
            items["media"] = max(rows, *drawn, 0) * pixels if sampling.decode else 0
        return items

    def _rows(self) -> int:
        """Rows of the largest micro-batch."""
        train = self._stage.train
        rows = math.ceil(self._per_rank / train.updates_per_step)
        if train.micro_batch_tokens and self._stage.kind == "text":
            return min(rows, max(1, train.micro_batch_tokens // self._size.row_elements))
        return min(rows, train.micro_batch_size or rows)

    def _activations(self) -> float:
        size, rows, train, sequence = self._size, self._rows(), self._stage.train, self._memory.sequence_ranks
        # An accelerator is planned for, unless the plan is for the CPU.
        is_serial = train.is_serial(self._plan.run.device)
        branches = 1 if train.detach_negative else size.step_rows
        steps = 1 if is_serial and self._separates_steps else self._train_rows // size.step_rows
        kept = rows * steps * branches
        if not self._memory.recomputes_blocks:
            return kept * size.saved_bytes / sequence
        # Blocks are computed again for one forward pass at a time.
        again = rows if is_serial else kept
        return (kept * size.kept_bytes + again * size.block_bytes) / sequence + size.unpacked_bytes

    def _gathered(self) -> float:
        """A block whole, the next one, and the root, or all that stays gathered, in the dtype that is computed in."""
        size, each = self._size, 2 if self._memory.compute_dtype else FP32
        # Frozen weights have their own dtype where none is computed in.
        is_own = self._is_lora and not self._memory.compute_dtype
        whole = size.weight_bytes - size.buffer_bytes if is_own else each * size.elements
        keeps = self._memory.keeps_gathered
        if keeps == "auto" and self._on_accelerator and whole <= GATHERED_SHARE * self._device_bytes:
            keeps = "always"
        return (
            whole if keeps == "always" and self._shards > 1 else each * (size.root_elements + 2 * size.block_elements)
        )

    def _update_bytes(self) -> int:
        """LoRA: the adapters. Full: every parameter, those that train in fp32."""
        size = self._size
        if self._is_lora:
            return FP32 * size.adapter_elements
        return size.weight_bytes - size.trained_bytes + FP32 * size.trained_elements

    @property
    def _further(self) -> list[tuple[int, int]]:
        """Samples of a prompt that are drawn and not trained on, with the denoise steps of each: scouts, and those
        that give SDE steps their rewards."""
        scouts, stage = self._plan.data.scouts, self._stage
        if not isinstance(stage.sampling, LatentSamplingConfig):
            return []
        expected = stage.samples * self._size.sde_steps if stage.needs.step_rewards else 0
        every = [
            (scouts.samples_per_prompt, scouts.num_inference_steps),
            (expected, stage.sampling.num_inference_steps),
        ]
        return [(count, steps) for count, steps in every if count]

    def _decode_bytes(self) -> int:
        """Weights are read for each token of all completions of a batch, keys and values for each token before it."""
        size, stage = self._size, self._stage
        if not isinstance(stage.sampling, TextSamplingConfig):
            return 0
        rows = math.ceil(self._samples / (self._processes.rollout or self._ranks))
        config = vars(stage.engine.config)
        batch = config.get("max_num_seqs") or config.get("forward_batch") or rows
        new = stage.sampling.max_new_tokens
        before = (size.row_elements - new) * new + new * (new + 1) // 2
        return round(math.ceil(rows / batch) * new * self._engine_weights() + rows * before * size.cache_bytes)

    def _bus_bytes(self) -> StepTime:
        own = {"train_rows": self._train_rows, "rows": self._per_rank, "micro_batch": self._rows()}
        generates = not self._processes.rollout and not self._is_external
        is_serial = self._stage.train.is_serial(self._plan.run.device)
        further = [(math.ceil(self._per_rank * count / self._stage.samples), steps) for count, steps in self._further]
        fakes = self._memory.auxiliary_steps if self._memory.auxiliary == "fake score" else 0
        return copied_bytes(
            self._stage, self._size, generates=generates, is_serial=is_serial, further=further, fakes=fakes, **own
        )

    def _num_checkpoints(self) -> int:
        run = self._plan.run
        saves = math.ceil(run.max_steps / run.save_every) if run.save_every else 1
        return min(saves, run.keep + 1) if run.keep else saves


def _whole(items: Mapping[str, float]) -> dict[str, int]:
    return {name: math.ceil(size) for name, size in items.items() if size}
