"""Choice of the weight transport to rollout workers, and the reasons a configured one cannot be used."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.core.errors import PlanRejected

from .actors import Actor
from .config import RayConfig

__all__ = ["carrier_between", "sender_of"]


def carrier_between(config: RayConfig, train: Sequence[Actor], rollout: Sequence[Actor]) -> str:
    """Name of the carrier to use for these workers. Raises PlanRejected for a configured one that cannot reach them.

    `auto` never picks `collective`, which makes receivers depend on each other, or `cuda-ipc`, which needs a shared
    GPU.
    """
    name, hosts = config.carrier, sorted({actor.facts.host for actor in (train[0], *rollout)})
    if name == "auto":
        return "shared-memory" if len(hosts) == 1 else "disk" if config.carrier_dir else "ray"
    reason = ""
    if name == "shared-memory" and len(hosts) > 1:
        reason = (
            f"the workers are on {', '.join(hosts)}. Use 'ray', 'collective', or 'disk' with a carrier_dir that all "
            "of them can reach"
        )
    elif name == "collective":
        reason = _apart((train[0], *rollout))
    elif name == "cuda-ipc":
        reason = next(filter(None, (_unshared(sender_of(actor, name, train), actor) for actor in rollout)), "")
    if reason:
        raise PlanRejected(f"launcher.carrier: got {name!r}, but {reason}.")
    return name


def sender_of(receiver: Actor, carrier: str, train: Sequence[Actor]) -> Actor:
    """The train rank that sends to a worker: rank 0, or with `cuda-ipc` the rank on the same device."""
    shared = [actor for actor in train if actor.place.device == receiver.place.device]
    return shared[0] if carrier == "cuda-ipc" and receiver.place.device is not None else train[0]


def _apart(members: Sequence[Actor]) -> str:
    """Why these workers cannot form a process group; empty when they can."""
    first, gpus = members[0], dict[str, Actor]()
    for actor in members:
        if actor.facts.device != first.facts.device:
            return (
                f"{first} is on {first.facts.device}, {actor} on {actor.facts.device}; a process group is either gloo "
                "on CPUs or NCCL on GPUs. Use 'auto'"
            )
        if actor.facts.gpu and actor.facts.gpu in gpus:
            return f"{gpus[actor.facts.gpu]} and {actor} share a GPU, and NCCL needs one GPU per rank. Use 'cuda-ipc'"
        gpus[actor.facts.gpu] = actor
    return ""


def _unshared(sender: Actor, receiver: Actor) -> str:
    """Why the receiver cannot map the sender's memory; empty when it can."""
    for actor in (sender, receiver):
        if not actor.facts.gpu:
            return f"{actor} is on {actor.facts.device}, and has no GPU memory to share. Use 'shared-memory'"
    if (sender.facts.host, sender.facts.gpu) != (receiver.facts.host, receiver.facts.gpu):
        return f"{sender} and {receiver} do not share a GPU. Use 'collective', or launcher.placement=colocate"
    return ""
