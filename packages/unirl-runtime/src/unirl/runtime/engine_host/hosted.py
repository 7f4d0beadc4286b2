"""An engine in a process of its own: its start, its weights, its sleep and its end. What it generates is for
subclasses.

Weights are checked before and after they are taken. A sync that did not come to its end leaves an engine that generates
nothing until full weights have come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unirl.core.errors import EchoMismatch, RecipeError, RunFailed
from unirl.core.hosted import HostedConfig
from unirl.core.roles import Model, WeightReceipt, WeightUpdate

from .process import EngineProcess, EngineRaised, Program
from .program import Product
from .transfer import Held, adapter_mismatch, files_of, full_mismatch, inventory

__all__ = ["UNSYNCED", "HostedEngine", "Hosting"]

UNSYNCED = -1
"""Version of an engine that holds the weights of its checkpoint, which are those of no version that trained here."""
SHORT_S = 60.0
"""Longest time for what takes no work."""


@dataclass(frozen=True, kw_only=True)
class Hosting:
    """An engine as its host needs to know it."""

    title: str
    """As its project writes it, for messages."""
    program: Program
    arguments: Mapping[str, Any]
    """Of the call `load`."""
    check_version: Callable[[Any], None]
    """Raises RunFailed for an answer to `version` that is of none that the engine was tried with."""
    rounds: bool = False
    """Weights in fp32 are rounded to what is held."""
    lora_rank: int = 0
    """Largest rank of adapters; 0 takes none."""
    overwrites: bool = False
    """Full weights go over everything that a sync writes, so that one which failed needs no new start."""
    sleeps: bool = False
    """`sleep` gives memory back; else it is bookkeeping of the host."""
    transfer_dir: str = ""
    """See `unirl.runtime.engine_host.transfer.files_of`."""
    start_timeout_s: float = 900.0
    generate_timeout_s: float = 3600.0
    sync_timeout_s: float = 600.0

    @classmethod
    def of(
        cls,
        product: Product,
        config: HostedConfig,
        *,
        program: Program,
        arguments: Mapping[str, Any],
        lora_rank: int,
        overwrites: bool = False,
    ) -> Hosting:
        """An engine with the settings of a recipe."""
        return cls(
            title=product.title,
            program=program,
            arguments=arguments,
            check_version=product.check_version,
            rounds=config.dtype != "auto",
            lora_rank=lora_rank,
            overwrites=overwrites,
            sleeps=config.sleep_mode,
            transfer_dir=config.transfer_dir,
            start_timeout_s=config.start_timeout_s,
            generate_timeout_s=config.generate_timeout_s,
            sync_timeout_s=config.sync_timeout_s,
        )


class HostedEngine:
    """Most of a `unirl.core.roles.Engine`. Calls may come from any thread, one at a time.

    Its program answers `version` (whatever `check_version` takes), `load` (takes `arguments`; name, dtype and shape of
    each weight as `weights`), `load_weights` (ValueError when nothing was written), `sleep` and `wake`.
    """

    def __init__(self, hosting: Hosting, *, model: Model) -> None:
        """Start it. Raises RecipeError for a model whose weights it does not hold by their names, RunFailed when it
        does not start or is of another version."""
        self.version = UNSYNCED
        self._hosting = hosting
        self._model = model
        self._lock = threading.RLock()
        self._process = EngineProcess(hosting.program)
        self._held: dict[str, Held] = {}
        self._unusable = ""
        """Why nothing can be generated until a full sync; empty when it can."""
        self._has_other_base = False
        """Whether the weights of the checkpoint were replaced."""
        self._is_asleep = False
        self._is_closed = False
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Take full weights or an adapter. The engine compares what it then computes with, bit for bit, with what came.

        Raises EchoMismatch for an update that does not fit, before anything changes; RunFailed when the engine fails in
        it, after which nothing is generated until full weights have come, which start a dead engine again.
        """
        with self._lock:
            if self._is_closed:
                raise RunFailed(f"weights: version {update.version} was sent to {self._name}, which was closed.")
            if update.kind != "lora" and not self._process.is_running:
                self._process.close()
                self._start()
            self._refuse_unfit(update)
            before, self._unusable = self._unusable, f"the sync of version {update.version} did not come to its end."
            with files_of(update, folder=self._hosting.transfer_dir) as paths:
                asked = {
                    "kind": "lora" if update.kind == "lora" else "full",
                    "paths": paths,
                    "checksum": update.checksum,
                    "scale": update.adapter_scale,
                    "version": update.version,
                }
                self._has_other_base = self._has_other_base or update.kind != "lora"
                try:
                    self._process.call("load_weights", asked, timeout_s=self._hosting.sync_timeout_s)
                except EngineRaised as error:
                    if error.raised == "ValueError":
                        # Raised before anything was written: what an earlier sync left is as it was.
                        self._unusable = before
                        raise EchoMismatch(
                            f"weights: {update.kind} of version {update.version}: {error.text}"
                        ) from error
                    # Layers of two versions.
                    if not self._hosting.overwrites:
                        self._process.close()
                    raise
            self._unusable = ""
            self.version = update.version
            return WeightReceipt(
                version=update.version,
                checksum=update.checksum,
                num_tensors=len(update.tensors),
                size_bytes=sum(tensor.numel() * tensor.element_size() for tensor in update.tensors.values()),
            )

    def sleep(self) -> None:
        """Where it can, give memory back, the weights kept elsewhere. Asleep, nothing is made."""
        with self._lock:
            if self._hosting.sleeps and not self._is_asleep:
                self._process.call("sleep", timeout_s=self._hosting.sync_timeout_s)
            self._is_asleep = True

    def wake(self) -> None:
        with self._lock:
            if self._hosting.sleeps and self._is_asleep:
                self._process.call("wake", timeout_s=self._hosting.sync_timeout_s)
            self._is_asleep = False

    def close(self) -> None:
        """End the engine and every process of it. May be called again, also while another thread generates."""
        self._is_closed = True
        self._process.close()

    @property
    def _name(self) -> str:
        return f"engine {self._hosting.program.name!r}"

    def _started(self, found: Mapping[str, Any]) -> None:
        """For subclasses, at the end of every start. found: the answer to `load`."""

    def _refuse_idle(self) -> None:
        """Raise RunFailed when nothing can be generated now."""
        if self._is_asleep:
            raise RunFailed(f"{self._name} is asleep and cannot generate; wake it first.")
        if self._unusable:
            raise RunFailed(f"{self._name} cannot generate: {self._unusable} Send it full weights.")

    def _generate(self, arguments: Mapping[str, Any], tensors: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Call `generate`."""
        try:
            return self._process.call(
                "generate", arguments, tensors=tensors, timeout_s=self._hosting.generate_timeout_s
            )
        except RunFailed:
            if not self._process.is_running:
                self._unusable = "its process ended while it generated."
            raise

    def _start(self) -> None:
        self._process.start()
        version, _ = self._process.call("version", timeout_s=SHORT_S)
        self._hosting.check_version(version)
        self._process.note(f"{self._name}: version {version}, run by {self._process.program.python}")
        found, _ = self._process.call("load", self._hosting.arguments, timeout_s=self._hosting.start_timeout_s)
        self._held = inventory(found["weights"])
        self._refuse_other_names()
        self.version, self._has_other_base, self._is_asleep = UNSYNCED, False, False
        self._started(found)

    def _refuse_other_names(self) -> None:
        """At the start rather than at the first sync: a model whose weights are held under other names."""
        # An adapter stands beside the layer that it is for, whose own weight then lies one name deeper.
        trains = {name.replace(".base_layer.", ".") for name, _ in self._model.trainable.named_parameters()}
        unknown = sorted(name for name in trains - self._held.keys() if ".lora_" not in name)
        if unknown:
            raise RecipeError(
                f"engine: {self._hosting.title} does not hold {len(unknown)} of the weights of model "
                f"{self._model.spec.name!r} by the names that they train under, such as {unknown[0]!r}, so they could "
                "not be sent. Experts of a mixture are held in another form; take a dense model, or engine=trainside."
            )

    def _refuse_unfit(self, update: WeightUpdate) -> None:
        what, rounds = f"weights: {update.kind} of version {update.version}", self._hosting.rounds
        if self._is_asleep:
            raise RunFailed(f"{what}: {self._name} is asleep and takes none; wake it first.")
        if update.kind != "lora":
            mismatch = full_mismatch(update, self._held, rounds=rounds)
            if mismatch and not full_mismatch(update, self._held, rounds=True):
                mismatch += " Or name engine.dtype: weights in fp32 are then rounded to it."
        elif update.tensors and not self._hosting.lora_rank:
            rank = next(iter(update.tensors.values())).shape[0]
            raise RecipeError(
                f"{what}: {self._name} was started without room for adapters; set engine.lora_rank={rank}."
            )
        elif self._unusable and self._has_other_base:
            raise RunFailed(f"{what}: an adapter cannot repair what {self._unusable} Send full weights.")
        else:
            mismatch = adapter_mismatch(update, self._held, most_rank=self._hosting.lora_rank)
        if mismatch:
            raise EchoMismatch(f"{what}: {mismatch}")
