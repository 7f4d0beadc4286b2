"""Which carrier brings weights to rollout workers, and why one that was asked for cannot."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.core.errors import PlanRejected

from .actors import Actor
from .config import RayConfig

__all__ = ["carrier_between", "sender_of"]


def carrier_between(config: RayConfig, train: Sequence[Actor], rollout: Sequence[Actor]) -> str:
    """Name of the carrier that reaches these workers. Raises PlanRejected for one that does not.

    `auto` takes none that needs more than was proven: a group ties the receivers to each other, and memory of a GPU
    can be mapped only where it is shared.
    """
    name, hosts = config.carrier, sorted({actor.facts.host for actor in (train[0], *rollout)})
    if name == "auto":
        return "shared-memory" if len(hosts) == 1 else "disk" if config.carrier_dir else "ray"
    reason = ""
    if name == "shared-memory" and len(hosts) > 1:
        reason = (
            f"the workers are on {', '.join(hosts)}. Use 'ray', 'collective', or 'disk' with a carrier_dir that all "
            "of them see"
        )
    elif name == "collective":
        reason = _apart((train[0], *rollout))
    elif name == "cuda-ipc":
        reason = next(filter(None, (_unshared(sender_of(actor, name, train), actor) for actor in rollout)), "")
    if reason:
        raise PlanRejected(f"launcher.carrier: {name!r} was asked for; {reason}.")
    return name


def sender_of(receiver: Actor, carrier: str, train: Sequence[Actor]) -> Actor:
    """The train rank that sends to a worker: rank 0, which is enough, or by `cuda-ipc` the one on the same device."""
    shared = [actor for actor in train if actor.place.device == receiver.place.device]
    return shared[0] if carrier == "cuda-ipc" and receiver.place.device is not None else train[0]


def _apart(members: Sequence[Actor]) -> str:
    """Why these cannot form a group; empty when they can."""
    first, gpus = members[0], dict[str, Actor]()
    for actor in members:
        if actor.facts.device != first.facts.device:
            return (
                f"{first} is on {first.facts.device}, {actor} on {actor.facts.device}, and a group is gloo on CPUs or "
                "NCCL on GPUs. Use 'auto'"
            )
        if actor.facts.gpu and actor.facts.gpu in gpus:
            return f"{gpus[actor.facts.gpu]} and {actor} share a GPU, and NCCL takes one rank a GPU. Use 'cuda-ipc'"
        gpus[actor.facts.gpu] = actor
    return ""


def _unshared(sender: Actor, receiver: Actor) -> str:
    """Why the receiver cannot map the sender's memory; empty when it can."""
    for actor in (sender, receiver):
        if not actor.facts.gpu:
            return f"{actor} is on {actor.facts.device}, and there is no memory of a GPU to share. Use 'shared-memory'"
    if (sender.facts.host, sender.facts.gpu) != (receiver.facts.host, receiver.facts.gpu):
        return f"{sender} and {receiver} do not share a GPU. Use 'collective', or launcher.placement=colocate"
    return ""
