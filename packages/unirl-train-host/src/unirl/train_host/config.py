"""Settings that training backends share."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from unirl.core.acceleration import BF16, FP16, FP32, Acceleration
from unirl.core.limits import Reason, limit, one_of
from unirl.core.match.mismatch_bounds import SIXTEEN_BITS
from unirl.core.specs.memory import Processes, TrainingMemory
from unirl.core.specs.part_config import BackendConfig, LauncherConfig

from .sections import AuxiliaryConfig, AverageConfig, CriticConfig, FakeScoreConfig, LoraSettings

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["ShardedConfig", "mesh_problems", "needs_torchao"]


def needs_torchao(key: str, what: str) -> Iterator[Reason]:
    """A reason where torchao, which a setting needs, is not installed. what: the setting's value, as in `got int8`."""
    if importlib.util.find_spec("torchao") is None:
        text = f"{what}, which needs torchao. Install it: `pip install 'unirl-train-host[quantize]'`."
        yield Reason(key=key, text=text)


@dataclass
class ShardedConfig(BackendConfig):
    """Settings of `unirl.train_host.backend.ShardedBackend`; a backend adds its own."""

    lora: LoraSettings = field(default_factory=LoraSettings)
    """LoRA settings, for `trains: lora`."""
    lr_schedule: str = one_of("constant", "linear", "cosine", default="constant")
    """`constant`; `linear` or `cosine` decay to `lr_min_ratio` times `lr` at the last step of the run."""
    lr_warmup_steps: int = limit(0, least=0)
    """Optimizer steps over which the learning rate rises linearly to `lr`, with any schedule."""
    lr_min_ratio: float = limit(0.0, least=0, most=1)
    """Final learning rate as a fraction of `lr`, in [0, 1], for `linear` and `cosine`."""
    lr_scales: dict[str, float] = limit(dict[str, float](), least=0, hint="It is a factor of `lr`; 0 freezes.")
    """Learning rates by part of the model: regular expression -> factor of `lr`, over its whole schedule, for the
    parameters in whose names it is found (`re.search`; `^` and `$` anchor it). Names are those of a checkpoint, such as
    `blocks.0.up.weight`, and with LoRA `blocks.0.up.lora_A.default.weight`. The first pattern that matches counts; each
    must be the first for a trainable parameter. Weight decay, `lr` times `weight_decay`, scales with it.

    0 freezes: no gradient, no optimizer state. Weights keep the values of the base checkpoint; adapters keep their
    initial ones, with which a layer computes what it does without. Gradient norms are those of the rest. A critic
    and a fake score are not scaled."""
    ema: AverageConfig = field(default_factory=AverageConfig)
    """Moving average of the weights, used as the policy `ema`."""
    lagged: AverageConfig = field(default_factory=lambda: AverageConfig(every="rollout"))
    """Moving average used as the policy `lagged`, for rollouts and losses that need older weights."""
    reference_copy: bool = False
    """Keep a copy of the initial weights as the reference policy. Not needed with LoRA, which disables the adapter."""
    moving_reference: AverageConfig = field(default_factory=lambda: AverageConfig(every="rollout"))
    """A reference policy that follows the live weights, in place of the initial ones: `constant` with a `decay` of 0
    and a `period` of 100 copies them every 100 rollouts. With LoRA a copy of the adapters."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """Settings of the critic, for algorithms that need one."""
    fake_score: FakeScoreConfig = field(default_factory=FakeScoreConfig)
    """Settings of the fake score, for algorithms that need one."""
    mixed_precision: str = one_of("none", "bf16", "fp16", default="none")
    """`bf16` or `fp16`: compute in that dtype, with fp32 master weights and fp32 gradient reduction. fp16 uses dynamic
    loss scaling."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    compile: str = one_of("none", "blocks", default="none")
    """`blocks`: compile each block of the model by torch.compile, for training and for rollouts in process. The first
    steps take longer by the compilation, and so does a new shape, once; torch caches what it compiled on disk
    (`TORCHINDUCTOR_CACHE_DIR`), for all ranks of a machine."""
    quantize: str = one_of("none", "int8", "nf4", default="none")
    """Keep the frozen weights of linear layers in the model's blocks in 8 bits (symmetric, one scale for each output
    channel) or 4 bits (QLoRA's NF4), through torchao. With LoRA, on one rank, with an engine that samples with this
    module."""
    offload_frozen: str = one_of("none", "blocks", default="none")
    """`blocks`: keep the frozen weights of the model's blocks in pinned CPU memory, on the device those of the block
    that computes and of the next one, which are copied meanwhile. With LoRA, where each rank has the model whole. The
    numbers are the same; each pass over the model copies all of its blocks over the bus."""
    defer_gradient_sync: bool = True
    """Reduce gradients over the ranks once per update instead of per micro-batch. Less communication, but each rank
    then holds the full, unsharded gradients of the trainable weights."""

    rounding_only = ("activation_checkpointing", "compile", "offload_frozen")
    accelerations: ClassVar[Mapping[str, Acceleration]] = {
        "mixed_precision": Acceleration(scope="both", error={"bf16": BF16, "fp16": FP16}),
        "activation_checkpointing": Acceleration(scope="training", error=0.0, tries=(True,)),
        "compile": Acceleration(scope="both", error=FP32),
        "offload_frozen": Acceleration(scope="both", error=0.0),
        # Of the largest weight of a channel, or of a block: half a step of 127 to each side, half of NF4's widest step.
        "quantize": Acceleration(scope="both", error={"int8": 1 / 254, "nf4": 0.152}),
    }

    def for_auxiliary(self, auxiliary: AuxiliaryConfig) -> Self:
        """These settings with the optimizer's of a critic or a fake score, which there is."""
        assert auxiliary.lr is not None
        return dataclasses.replace(
            self, lr=auxiliary.lr, max_grad_norm=auxiliary.max_grad_norm, lr_warmup_steps=auxiliary.lr_warmup_steps
        )

    @property
    def fills_weights(self) -> bool:
        """See `BackendConfig`: quantized layer by layer, so that the model is never held in its dtype, or read to CPU
        memory block by block, so that it is never on the device."""
        return self.quantize != "none" or self.offload_frozen != "none"

    @property
    def replicates(self) -> bool:
        """Whether each of several ranks has the frozen weights whole, and none is wrapped."""
        return False

    def kept(self, *, shard: int, sequence: int, optimizer_bytes: float = 8) -> TrainingMemory:
        """Memory that a backend keeps on a mesh without tensor parallelism.

        shard: ranks of one copy of the weights, 0 for all.  sequence: of those, ranks that share the tokens of a row.
        optimizer_bytes: state of a trained parameter, on average.
        """
        averages = {
            "ema": self.ema.kind,
            "lagged": self.lagged.kind,
            "moving reference": self.moving_reference.kind,
        }
        # Dedicated workers answer for the reference policy, but a copy that was asked for is kept.
        copies = (["reference"] if self.reference_copy else []) + [
            name for name, kind in averages.items() if kind != "none"
        ]
        lora = self.trains == "lora"
        auxiliary: Literal["", "critic", "fake score"] = ""
        if self.critic.lr is not None:
            auxiliary = "critic"
        elif self.fake_score.lr is not None:
            auxiliary = "fake score"
        steps = {"critic": self.critic.steps_per_update, "fake score": self.fake_score.steps_per_update}
        return TrainingMemory(
            lora_rank=self.lora.rank if lora else 0,
            lora_targets=tuple(self.lora.targets) if lora else (),
            copies=tuple(copies),
            optimizer_bytes=optimizer_bytes,
            auxiliary=auxiliary,
            auxiliary_steps=steps.get(auxiliary, 0),
            lr_scales=self.lr_scales,
            shard_ranks=shard,
            row_ranks=self.copies,
            sequence_ranks=sequence,
            compute_dtype={"bf16": "bfloat16", "fp16": "float16"}.get(self.mixed_precision, ""),
            whole_gradients=self.defer_gradient_sync,
            recomputes_blocks=self.activation_checkpointing,
            quantized="" if self.quantize == "none" else self.quantize,
            offloads_blocks=self.offload_frozen == "blocks",
        )

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Invalid patterns, a reference copy that LoRA does not need, and policies or a critic that do not fit the
        algorithm."""
        for pattern in self.lr_scales:
            try:
                re.compile(pattern)
            except re.error as error:
                text = f"got {pattern!r}, expected a regular expression; Python reports: {error}. Put a backslash "
                text += r"before special characters that are meant as they are, as in `blocks\.0\.`."
                yield Reason(key=f".lr_scales.{pattern}", text=text)
        if self.moving_reference.kind != "none" and self.reference_copy:
            text = "got true, but moving_reference keeps a reference policy that moves; leave one of them out."
            yield Reason(key=".reference_copy", text=text)
        elif self.trains == "lora" and self.reference_copy:
            yield Reason(
                key=".reference_copy",
                text="got true, but with LoRA the reference policy is the model without its adapter; leave it out.",
            )
        if self.quantize != "none":
            yield from self._for_quantized()
            if plan is not None and stage is not None:
                yield from self._for_quantized_in(plan, stage)
        if self.offload_frozen != "none":
            yield from self._for_offloaded()
            if plan is not None and stage is not None:
                yield from self._for_offloaded_in(plan, stage)
        if plan is not None and stage is not None:
            yield from self._for_the_algorithm(plan, stage)
            yield from self._for_evaluation(plan)
            yield from self._for_the_model(stage)
            if self.compile != "none" and plan.run.batch_invariant:
                yield Reason(
                    key=".compile",
                    text=f"got {self.compile} with run.batch_invariant=true; kernels are compiled for the shapes at "
                    "hand, and torch promises no equal bits between them. Use none.",
                )

    def _for_quantized(self) -> Iterator[Reason]:
        key, what = ".quantize", f"got {self.quantize}"
        yield from needs_torchao(key, what)
        if self.trains == "full":
            yield Reason(key=key, text=f"{what}, but quantized weights cannot be trained. Use backend.trains=lora.")
        if self.mixed_precision != "none":
            text = f"{what} with mixed_precision={self.mixed_precision}, which wraps the module, and quantized weights "
            text += "cannot be sharded. Use mixed_precision=none with model.autocast=bfloat16 where the model has it."
            yield Reason(key=key, text=text)
        if self.compile != "none":
            yield Reason(
                key=key, text=f"{what} with compile={self.compile}, which has not been tried. Set one of them to none."
            )
        if self.quantize == "int8" and not self.activation_checkpointing:
            text = f"{what} without activation_checkpointing: autograd would keep the weights of every layer in the "
            text += "model's dtype for the backward pass. Set activation_checkpointing=true, or use nf4."
            yield Reason(key=key, text=text)

    def _for_quantized_in(self, plan: Plan, stage: Stage) -> Iterator[Reason]:
        key, what, model, engine = ".quantize", f"got {self.quantize}", stage.model, stage.engine
        if not model.spec.wrap_blocks:
            yield Reason(key=key, text=f"{what}, but model {model.name!r} names no blocks to quantize; use none.")
        processes = _processes(plan)
        if processes.train > 1:
            text = f"{what} with {processes.train} train ranks; quantized weights cannot be sharded. Use one, or none."
            yield Reason(key=key, text=text)
        elif not engine.spec.reads_weights:
            text = f"{what}, but engine {engine.name!r} samples with weights that are not quantized, so with another "
            yield Reason(key=key, text=text + "policy than the one that trains. Use engine=trainside.")
        elif processes.rollout or processes.reference:
            text = (
                f"{what}, but other processes of launcher {plan.launcher.name if plan.launcher else ''!r} hold weights "
            )
            text += (
                "that are not quantized, so another policy than the one that trains. Have the train rank do their work."
            )
            yield Reason(key=key, text=text)

    def _for_offloaded(self) -> Iterator[Reason]:
        key, what = ".offload_frozen", f"got {self.offload_frozen}"
        if self.trains == "full":
            yield Reason(key=key, text=f"{what}, but all weights train. Use backend.trains=lora, or none.")
        if self.quantize != "none":
            yield Reason(key=key, text=f"{what} with quantize={self.quantize}. Set one of them to none.")
        if self.critic.lr is not None and self.mixed_precision != "none":
            text = f"{what} with a critic and mixed_precision={self.mixed_precision}, which wraps the module. Use "
            yield Reason(
                key=key, text=text + "mixed_precision=none with model.autocast=bfloat16 where the model has it."
            )

    def _for_offloaded_in(self, plan: Plan, stage: Stage) -> Iterator[Reason]:
        key, what, model = ".offload_frozen", f"got {self.offload_frozen}", stage.model
        if not model.spec.wrap_blocks:
            yield Reason(key=key, text=f"{what}, but model {model.name!r} names no blocks to offload; use none.")
        if (ranks := _processes(plan).train) > 1 and not self.replicates:
            text = (
                f"{what} with {ranks} train ranks, which share the weights and gather them from each other's devices. "
            )
            yield Reason(key=key, text=text + "Use one rank, with fsdp2 backend.mesh.shard=1, or none.")
        dtype, autocast = (getattr(model.config, name, None) for name in ("dtype", "autocast"))
        computed = {"bf16": "bfloat16", "fp16": "float16"}.get(self.mixed_precision, dtype)
        if computed != dtype:
            text = (
                f"{what} with mixed_precision={self.mixed_precision} and model.dtype={dtype}, which wraps the module. "
            )
            yield Reason(key=key, text=text + f"Use model.dtype={computed}, or mixed_precision=none.")
        if autocast not in (None, dtype) and not self.activation_checkpointing:
            text = f"{what} with model.dtype={dtype} and model.autocast={autocast}: autograd would keep the weights of "
            text += "every layer in the second for the backward pass. Use one dtype, or "
            yield Reason(key=key, text=text + "backend.activation_checkpointing=true.")

    def _for_the_algorithm(self, plan: Plan, stage: Stage) -> Iterator[Reason]:
        assert stage.algorithm is not None
        needs, asks = stage.needs, f"algorithm {stage.algorithm.name!r}"
        moves = self.moving_reference.kind != "none"
        keeps_reference = self.trains == "lora" or self.reference_copy or moves or plan.has_reference_workers
        if moves and (why := _unmoved(plan, stage)):
            text = f"got {self.moving_reference.kind!r}, but {why}. Set it to none."
            yield Reason(key=".moving_reference.kind", text=text)
        if needs.reference == "policy" and not keeps_reference and not stage.teachers:
            yield Reason(
                key=".reference_copy",
                text=f"{asks} needs a reference policy, which full training does not keep by default; set "
                "backend.reference_copy=true, or use dedicated workers, such as launcher.reference=separate.",
            )
        if needs.sampler != "live" and (self.lagged if needs.sampler == "lagged" else self.ema).kind == "none":
            yield Reason(
                key=f".{needs.sampler}.kind",
                text=f"got none, but {asks} trains on samples from the {needs.sampler} policy; set a kind, such as "
                "constant.",
            )
        if needs.critic and self.critic.lr is None:
            yield Reason(
                key=".critic.lr",
                text=f"got null, but {asks} trains a critic; set its learning rate, such as 1e-5.",
            )
        if needs.critic and stage.kind == "latent" and "text" in stage.model.spec.tracks.values():
            yield Reason(
                key=stage.algorithm.key,
                text=f"got {stage.algorithm.name!r}, which trains a critic of denoise steps; backends build one of "
                f"tokens for model {stage.model.name!r}, which also writes. Use an algorithm without a critic, such as "
                "flow-grpo.",
            )
        if needs.fake_score and self.fake_score.lr is None:
            yield Reason(
                key=".fake_score.lr",
                text=f"got null, but {asks} trains a fake score; set its learning rate, such as backend.lr.",
            )
        if self.fake_score.lr is not None and not needs.fake_score:
            yield Reason(
                key=".fake_score.lr",
                text=f"got {self.fake_score.lr}, but {asks} does not train a fake score. Set it to null, or use an "
                "algorithm that does, such as dmd2.",
            )
        if self.critic.lr is not None and not needs.critic:
            yield Reason(
                key=".critic.lr",
                text=f"got {self.critic.lr}, but {asks} does not train a critic. Set it to null, or use an algorithm "
                "that does, such as ppo for text or flow-ppo for images.",
            )

    def _for_evaluation(self, plan: Plan) -> Iterator[Reason]:
        policy, run = plan.eval.policy, plan.run
        kinds = {"ema": self.ema.kind, "lagged": self.lagged.kind, "reference": self.moving_reference.kind}
        if kinds.get(policy) != "none":
            return
        if policy == "reference" and self.trains == "lora":
            for name, value in {"export_every": run.export_every, "export_best": run.export_best}.items():
                if value:
                    text = f"got {value} with eval.policy=reference, the model without its adapter: there is none to "
                    yield Reason(key=f"run.{name}", text=text + "export. Evaluate another policy, or leave it out.")
        elif policy != "reference" or not self.reference_copy:
            needed = "reference_copy=true" if policy == "reference" else f"{policy}.kind=constant"
            text = f"got {policy!r}, which the backend does not keep. Set backend.{needed}, or evaluate 'live'."
            yield Reason(key="eval.policy", text=text)

    def _for_the_model(self, stage: Stage) -> Iterator[Reason]:
        model = stage.model
        dtype, autocast = (getattr(model.config, key, None) for key in ("dtype", "autocast"))
        if self.trains == "full" and dtype in SIXTEEN_BITS and autocast is None and self.mixed_precision == "none":
            yield Reason(
                key=".mixed_precision",
                text=f"got none with model.dtype={dtype}; trainable weights are kept in float32, so nothing would be "
                "computed in that dtype. Use bf16 or fp16, or model.dtype=float32.",
            )
        for key, is_set in (
            (".activation_checkpointing", self.activation_checkpointing),
            (".compile", self.compile != "none"),
        ):
            if is_set and not model.spec.wrap_blocks:
                yield Reason(key=key, text=f"model {model.name!r} names no blocks, which it is for; leave it off.")


def _unmoved(plan: Plan, stage: Stage) -> str:
    """Why no loss would take the log-probs of a reference policy that moves; empty where one does."""
    assert stage.algorithm is not None
    if stage.teachers:
        return f"the reference policy of stage {stage.name!r} is {stage.teachers[0].name!r}"
    if plan.has_reference_workers:
        return "reference workers hold the initial weights"
    if stage.needs.reference == "none":
        return f"algorithm {stage.algorithm.name!r} uses no reference policy as configured"
    return ""


def mesh_problems(mesh: Any, plan: Plan, stage: Stage) -> Iterator[Reason]:
    """Reasons against a mesh that the train ranks of a plan cannot be laid out on, or that splits the sequence of a
    model that cannot. Launchers check that the ranks are a multiple of `BackendConfig.copies`."""
    ranks, tensor = _processes(plan).train, getattr(mesh, "tensor", 1)
    for axis, size in vars(mesh).items():
        if ranks == 1 and size > 1:
            text = f"got {size}, but one process trains. Use 1, or several, such as launcher=ray "
            yield Reason(key=f".mesh.{axis}", text=f"{text}launcher.train_ranks={size}.")
    if ranks > 1 and mesh.shard and (ranks // tensor) % mesh.shard:
        text = f"got {mesh.shard}, expected a divisor of {ranks // tensor}, the train ranks"
        text += f" / mesh.tensor {tensor}" * (tensor > 1)
        yield Reason(key=".mesh.shard", text=f"{text}; 0 takes all.")
    if mesh.sequence > 1 and not stage.model.spec.splits_sequence:
        text = f"got {mesh.sequence}, but model {stage.model.name!r} cannot split its sequence; use 1."
        yield Reason(key=".mesh.sequence", text=text)


def _processes(plan: Plan) -> Processes:
    launcher = plan.launcher.config if plan.launcher is not None else LauncherConfig()
    assert isinstance(launcher, LauncherConfig), "the catalog checks the base class of configs"
    return launcher.processes
