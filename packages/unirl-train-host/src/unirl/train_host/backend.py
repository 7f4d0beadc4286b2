"""Training backend, except for sharding: owns the trainable weights until the end."""

from __future__ import annotations

import traceback
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from unirl.core.errors import EchoMismatch, RecipeError, RunFailed
from unirl.core.roles import Backend, WeightUpdate
from unirl.core.specs.facts import names_in
from unirl.core.types.weights import forms, joined, tensor_digests, weight_mismatch
from unirl.numerics.diffusion.replay import check_stored_steps
from unirl.numerics.train.critic import with_values
from unirl.numerics.train.reference import with_reference
from unirl.numerics.train.stack import train_on
from unirl.numerics.train.track_replay import TrackReplay

from . import checkpoint
from .block_offload import OffloadedBlocks
from .config import ShardedConfig
from .critic import Critic
from .critic_nets import critic_net
from .export import gathered
from .fake_score import FakeScore
from .optimizer import Optimizer
from .policies import Policies
from .prepare import check_blocks, check_ranks, prepare
from .quantize import quantize
from .ranks import Ranks
from .sharding import (
    DTYPES,
    allocate,
    compile_blocks,
    fill,
    find_blocks,
    forget_forwards,
    is_empty,
    recompute,
    reshard,
    shard,
)
from .sources import plain, sources_of
from .staging import Staging
from .updater import ShardedUpdater

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from unirl.core.roles import Job, Model, Policy, TrainReport
    from unirl.core.specs.config import TrainConfig
    from unirl.core.types.track import Track

__all__ = ["ShardedBackend"]

CRITIC = "critic"
"""Folder of the critic within a checkpoint."""
FAKE_SCORE = "fake_score"
"""Folder of the fake score within a checkpoint."""
Saved: TypeAlias = tuple[str, Mapping[str, Tensor], Mapping[str, Any]]
"""Name of a folder within a checkpoint, and its tensors and facts."""


class ShardedBackend(Backend):
    """Every method that touches weights is collective: all ranks call it."""

    def __init__(self, config: ShardedConfig, *, model: Model, train: TrainConfig, steps: int, seed: int) -> None:
        self._config = config
        self._train = train
        self._module = model.trainable
        self._device = torch.device(model.device)
        # Dropout would make two replays of one latent differ, and the ratio of the first update not 1.
        self._module.eval()
        # Sharding renames classes.
        kinds = names_in(model.spec.wrap_blocks, self._module)
        blocks = find_blocks(self._module, kinds)
        check_blocks(config, blocks)
        stacked = not train.is_serial(self._device.type)
        # Before the adapters: the critic is a copy of the checkpoint.
        in_model_dtype = config.trains == "lora" and config.mixed_precision not in DTYPES
        net = critic_net(model, in_model_dtype=in_model_dtype) if config.critic.lr is not None else None
        self.num_lora_layers, scales = prepare(model, config, seed=seed, device=self._device)
        if config.activation_checkpointing:
            recompute(blocks)
        if config.compile == "blocks":
            compile_blocks(blocks, device=self._device)
        self._ranks = self._join(model)
        self._staging = Staging(self._device)
        check_ranks(config, self._ranks)
        if config.quantize != "none":
            fill = partial(self._fill, model)
            quantize(self._module, blocks, kind=config.quantize, device=self._device, fill=fill)
        self._offloaded: OffloadedBlocks | None = None
        self._wraps = self._distribute(model, blocks)
        self._frozen: list[nn.Module] = []
        self._held: dict[str, Tensor] = dict(self._module.named_parameters())
        self._params = {name: param for name, param in self._held.items() if param.requires_grad}
        updates = steps * train.updates_per_step
        self._optimizer = self._new_optimizer(config, total_steps=updates)
        self._optimizer.scale_rates(scales)
        self._critic: Critic | None = None
        if net is not None:
            self._critic = Critic(
                net,
                config,
                model=model,
                blocks=find_blocks(net, kinds),
                ranks=self._ranks,
                wraps=self._wraps,
                packing=train.packing,
                stacked=stacked,
                updates=updates,
            )
        self._policies = Policies(self._module, params=self._params, config=config)
        defers = config.defer_gradient_sync
        over = partial(ShardedUpdater, self._module, ranks=self._ranks, device=self._device, defer_sync=defers)
        self._updater = over(self._optimizer, after_step=partial(self._policies.move, "step"))
        self._fake_score: FakeScore | None = None
        if (fake := config.fake_score).lr is not None:
            optimizer = self._new_optimizer(config.for_auxiliary(fake), total_steps=updates * fake.steps_per_update)
            self._fake_score = FakeScore(fake, optimizer=optimizer, updater=over(optimizer), policies=self._policies)
        self._replay = TrackReplay(
            model,
            stacked=stacked,
            policy_context=self.policy,
            packing=train.packing,
            only_positive=train.detach_negative,
        )

    @abstractmethod
    def _join(self, model: Model) -> Ranks:
        """Join the training processes, and refuse a mesh that does not fit them or the model."""

    @abstractmethod
    def _distribute(self, model: Model, blocks: Sequence[nn.Module]) -> bool:
        """Wrap the module over the ranks, give it values if it was built without, and tell whether it was wrapped; one
        that is not wrapped gets them by `_complete`.

        blocks: those of the model's `wrap_blocks`.
        """

    def _complete(self, model: Model, blocks: Sequence[nn.Module]) -> None:
        """Give the module, which each rank has whole, its values if it was built without, and offload its blocks if the
        settings say so."""
        with ExitStack() as stack:
            if self._config.offload_frozen == "blocks":
                fill = partial(self._fill, model)
                self._offloaded = OffloadedBlocks(self._module, blocks, device=self._device, fill=fill)
                stack.enter_context(self._offloaded.set_aside())
            if is_empty(self._module):
                allocate(self._module, self._device)
                self._fill(model, self._module.state_dict(keep_vars=True))

    def _fill(self, model: Model, tensors: Mapping[str, Tensor]) -> None:
        """Set tensors of the module, by their names in it, to the checkpoint's values."""
        model.fill(plain(tensors, trains=self._config.trains))

    def _new_optimizer(self, config: ShardedConfig, *, total_steps: int) -> Optimizer:
        """Over the parameters that train. config: these settings, or those of what trains beside the policy."""
        return Optimizer(self._params, config, total_steps=total_steps)

    def _view(self, tensor: Tensor) -> Tensor:
        """A tensor laid out as a parameter is, viewed as a shard of the whole tensor; the same memory."""
        return tensor

    @property
    def version(self) -> int:
        """Optimizer steps taken."""
        return self._optimizer.num_steps

    def version_of(self, policy: Policy = "live") -> int:
        """See `unirl.core.roles.Backend`."""
        if policy == "live":
            return self.version
        self._policies.switch(policy)  # refuses a policy that is not kept
        return self._policies.averages[policy].num_moves if policy in self._policies.averages else 0

    @property
    def num_trainable(self) -> int:
        """Number of trainable parameters, over all ranks."""
        return sum(self._view(param).numel() for param in self._params.values())

    def policy(self, which: Policy = "live") -> AbstractContextManager[None]:
        """See `unirl.core.roles.Backend` and `Policies.use`."""
        return self._policies.use(which)

    def train(self, jobs: Sequence[Job], *, progress: float) -> TrainReport:
        self._policies.check_live("training would change its weights")
        self._forget_forwards()
        self._ranks.check_same_rows(sample for job in jobs for sample in job.track.sample_ids)
        return train_on(
            jobs,
            forward=self._replay,
            updater=self._updater,
            train=self._train,
            version=self.version,
            progress=progress,
            critic=self._critic,
            fake_score=self._fake_score,
            facts={"trainable_weights": float(self.num_trainable), "lora_layers": float(self.num_lora_layers)},
        )

    def hold_frozen(self, model: Model) -> None:
        """See `unirl.core.roles.Backend`. It computes in the model's dtype and stays on the device."""
        module = model.trainable
        if self._wraps:
            blocks = find_blocks(module, names_in(model.spec.wrap_blocks, module))
            shard(module, blocks, ranks=self._ranks, precision="none")
            self._frozen.append(module)
        allocate(module, self._device)
        model.fill(module.state_dict(keep_vars=True))

    def with_reference(self, track: Track, *, policy: Policy = "reference") -> Track:
        return self._in_chunks(track, lambda micro: with_reference(micro, self._replay, policy=policy))

    def with_values(self, track: Track) -> Track:
        """See `unirl.core.roles.Backend`."""
        if self._critic is None:
            raise RecipeError(
                "backend.critic.lr: got null, but the algorithm needs the values of a critic; set it, such as 1e-5."
            )
        critic = self._critic
        return self._in_chunks(track, lambda micro: with_values(micro, critic))

    def _in_chunks(self, track: Track, change: Callable[[Track], Track]) -> Track:
        """The change of a track, micro-batch by micro-batch on the device."""
        check_stored_steps(track)
        micros = track.chunks(self._train.micro_batch_size)
        return type(track).concat([micro.computed_on(self._device, change) for micro in micros])

    def export_weights(
        self,
        *,
        policy: Policy = "live",
        kind: Literal["full", "lora", "merged"],
        dtypes: Mapping[str, str] | None = None,
    ) -> WeightUpdate:
        """Whole weights of a policy, each gathered when it is asked for: `full` when all train, `lora` or `merged`
        (folded in) when adapters do. See `unirl.core.roles.Backend`.

        With full training `merged` is `full`. Raises RecipeError for a kind that does not fit `backend.trains`.
        """
        trains = self._config.trains
        if (kind == "lora" and trains == "full") or (kind == "full" and trains == "lora"):
            raise RecipeError(f"backend.trains: got {trains!r}, which has no {kind!r} weights; export 'merged'.")
        is_base = policy == "reference" and "reference" not in self._policies.copies
        if kind == "lora" and is_base:
            raise RecipeError("backend: the reference policy is the base model and has no 'lora' weights to export.")
        version = self.version_of(policy)

        def shard_of(name: str) -> Tensor:
            if self.version_of(policy) != version:
                raise RunFailed(
                    f"weights: tensor {name!r} of version {version} of the {policy} policy was asked for, which is at "
                    f"version {self.version_of(policy)} by now. Take all tensors of an update before training goes on."
                )
            # A weight in CPU memory is added to by an adapter on the device.
            place = self._offloaded and next(iter(self._params.values())).device
            return self._view(self._policies.shard_of(name, self._held[name], policy)).to(place or None)

        reshard(self._module)
        sources = sources_of(self._module, self._held, trains=trains, kind=kind, is_on=not is_base)
        held = {name: self._view(tensor) for name, tensor in self._held.items()}
        tensors = gathered(sources, held=held, shard_of=shard_of, dtypes=dtypes or {})
        digests = tensor_digests(tensors)
        return WeightUpdate(
            version=version,
            tensors=tensors,
            kind=kind,
            adapter_scale=self._config.lora.alpha / self._config.lora.rank if kind == "lora" else 1.0,
            checksum=joined(digests.values()),
            digests=digests,
        )

    def adopt(self, update: WeightUpdate) -> None:
        """Take `full` or `lora` weights that another backend of this recipe exported, and its version. Collective."""
        self._policies.check_live("adopting would change its weights")
        held = self._holders(update.kind)
        mismatch = weight_mismatch(forms(update.tensors), held)
        if mismatch:
            raise EchoMismatch(f"backend: {update.kind} weights of version {update.version}: {mismatch}")
        reshard(self._module)
        self._forget_forwards()
        for name, tensor in update.tensors.items():
            fill(held[name], tensor)
        self._optimizer.num_steps = update.version

    def save(self, folder: Path) -> None:
        """Write trainable weights, optimizer state, averages and counters; what never changes is not saved."""
        self._write(folder, self._saved())

    def snapshot(self) -> Callable[[Path], None]:
        """See `unirl.core.roles.Backend`."""
        places, tensors, facts = zip(*self._saved(), strict=True)
        copies = list(zip(places, self._staging.copies(tensors), facts, strict=True))
        group = self._ranks.background_group

        def write(folder: Path) -> None:
            try:
                # DCP waits for the current stream every few MB; the default one has the work of training.
                on_cuda = self._device.type == "cuda"
                with torch.cuda.stream(torch.cuda.Stream(self._device)) if on_cuda else nullcontext():
                    self._write(folder, copies, group=group)
            except BaseException as error:
                # The error outlives the run, and its frames hold the copies.
                traceback.clear_frames(error.__traceback__)
                self._staging.free()
                raise
            finally:
                copies.clear()

        return write

    def _saved(self) -> Sequence[Saved]:
        """Tensors and facts of each folder of a checkpoint, the first of them its own. Collective."""
        self._policies.check_live("saving would save its weights as the live ones")
        reshard(self._module)
        own = {**self._setup(), "turns": {name: copy.num_turns for name, copy in self._policies.averages.items()}}
        return [
            (place, {**tensors, **optimizer.moments()}, {**({} if place else own), **optimizer.facts()})
            for place, optimizer, tensors in self._trained()
        ]

    def _trained(self) -> list[tuple[str, Optimizer, Mapping[str, Tensor]]]:
        """Folder within a checkpoint, optimizer and weights of the policy, and of what trains beside it."""
        trained: list[tuple[str, Optimizer, Mapping[str, Tensor]]] = [("", self._optimizer, self._weight_tensors())]
        if self._critic is not None:
            trained.append((CRITIC, self._critic.optimizer, self._critic.tensors()))
        if self._fake_score is not None:
            weights = {f"weights/{name}": self._view(value) for name, value in self._fake_score.weights.items()}
            trained.append((FAKE_SCORE, self._fake_score.optimizer, weights))
        return trained

    def _write(self, folder: Path, saved: Sequence[Saved], *, group: ProcessGroup | None = None) -> None:
        first, single = self._ranks.rank == 0, not self._ranks.is_grouped
        for place, tensors, facts in saved:
            checkpoint.write(folder / place, tensors=tensors, facts=facts, is_writer=first, single=single, group=group)

    def load(self, folder: Path) -> None:
        """Resume from a checkpoint, on any number of ranks.

        Raises CheckpointError, before anything changes, if it is incomplete or from another configuration.
        """
        reshard(self._module)
        single, opened = not self._ranks.is_grouped, list[tuple[Optimizer, checkpoint.Opened]]()
        for place, optimizer, wanted in self._trained():
            moments, setup = optimizer.moments(create=True), {} if place else self._setup()
            there = checkpoint.Opened(folder / place, setup=setup, wanted=wanted, moments=moments, single=single)
            opened.append((optimizer, there))
        for optimizer, one in opened:
            optimizer.resume(one.facts, one.read())
        for name, average in self._policies.averages.items():
            average.num_turns = int(opened[0][1].facts["turns"][name])

    def end_rollout(self) -> None:
        self._policies.move("rollout")

    def offload(self) -> None:
        """Move weights, optimizer state and weight copies to CPU memory, if they are not there already."""
        self._to(torch.device("cpu"))

    def onload(self) -> None:
        self._to(self._device)

    def close(self) -> None:
        self._staging.free()
        self._ranks.close()

    def _forget_forwards(self) -> None:
        for module in (self._module, *self._frozen):
            forget_forwards(module)

    def _holders(self, kind: str) -> dict[str, Tensor]:
        """The live tensors, by the names that `weights` exports them under."""
        trains = self._config.trains
        if kind != trains:
            raise RecipeError(f"backend.trains: got {trains!r}, which cannot load {kind!r} weights.")
        sources = sources_of(self._module, self._held, trains=trains, kind=kind)
        return {exported: self._view(self._held[source.name]) for exported, source in sources.items()}

    def _setup(self) -> dict[str, Any]:
        """Settings that a check of tensor shapes would not tell apart. Collective."""
        lora = self._config.lora
        return {
            "trains": self._config.trains,
            "lora_alpha": lora.alpha if self._config.trains == "lora" else None,
            # In their order, which counts.
            "lr_scales": [list(item) for item in self._config.lr_scales.items()] or None,
            "critic": True if self._critic else None,
            "fake_score": True if self._fake_score else None,
            "reference_checksum": self._reference_checksum,
        }

    @cached_property
    def _reference_checksum(self) -> str | None:
        """Checksum of the initial weights, if a copy is kept: a resumed run takes them from the base. Collective."""
        return self.export_weights(policy="reference", kind="merged").checksum if self._config.reference_copy else None

    def _weight_tensors(self) -> dict[str, Tensor]:
        # Frozen adapters, too, which the base checkpoint does not have.
        own = {name: param for name, param in self._held.items() if name in self._params or ".lora_" in name}
        tensors = {f"weights/{name}": self._view(param.detach()) for name, param in own.items()}
        for kind, copy in self._policies.averages.items():
            tensors.update({f"{kind}/{name}": self._view(value) for name, value in copy.values.items()})
        return tensors

    def _to(self, device: torch.device) -> None:
        self._policies.check_live("moving would swap weights on two devices")
        reshard(self._module)
        with self._offloaded.set_aside() if self._offloaded is not None else nullcontext():
            self._module.to(device)
        self._optimizer.to(device)
        for copy in self._policies.copies.values():
            copy.to(device)
        if self._critic is not None:
            self._critic.to(device)
        if self._fake_score is not None:
            self._fake_score.optimizer.to(device)
