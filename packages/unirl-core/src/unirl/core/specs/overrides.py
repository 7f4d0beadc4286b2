"""Values that one part gives for fields of another's dataclass: options of plugins, and settings that an algorithm
proposes for other sections."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from ..limits import Reason
from ..names import did_you_mean
from ..types.sampling import LatentSamplingConfig, TextSamplingConfig
from .config import AdvantageConfig, TrainConfig
from .leaves import leaves

if TYPE_CHECKING:
    from .spec import AlgorithmSpec

__all__ = ["SECTIONS", "ValueIf", "has_key", "option_problems", "wrong_proposals"]

SECTIONS = ("sampling", "train", "backend", "advantage")
"""Sections that an algorithm may propose settings for."""


@dataclass(frozen=True, kw_only=True)
class ValueIf:
    """A proposed value that depends on other settings of the same section."""

    value: Any
    when: Mapping[str, Any]
    """Dotted keys, section included -> the values under which it is proposed."""


def has_key(defaults: Any, key: str) -> bool:
    """Whether a config dataclass, given by an instance of it, has a dotted key: a value, a section or a free entry."""
    known = leaves(asdict(defaults))
    free = any(value == {} and key.startswith(f"{path}.") for path, value in known.items())
    return free or any(f"{path}.".startswith(f"{key}.") for path in known)


def wrong_proposals(spec: AlgorithmSpec) -> Iterator[str]:
    """A sentence for each proposal of a key that its section does not have.

    Backends differ in their keys, so theirs are looked up when a recipe is composed.
    """
    sampling = {"latent": [LatentSamplingConfig()], "text": [TextSamplingConfig()]}
    every = [*sampling["latent"], *sampling["text"]]
    known: dict[str, list[Any]] = {"train": [TrainConfig()], "advantage": [AdvantageConfig()], "backend": []}
    known["sampling"] = sampling.get(spec.needs.track, every)
    for path, value in spec.proposes.items():
        section, _, key = path.partition(".")
        if section not in SECTIONS or not key:
            yield f"proposes: got {path!r}, expected a key of {', '.join(SECTIONS)}, such as 'sampling.eta'"
            continue
        entries = leaves(cast("Mapping[str, Any]", value), under=key) if isinstance(value, Mapping) else {key: value}
        for entry in entries:
            if known[section] and not any(has_key(one, entry) for one in known[section]):
                kind = type(known[section][0]).__name__
                hint = did_you_mean(entry, leaves(asdict(known[section][0])))
                yield f"proposes: got {section}.{entry!s}; {kind} has no such key{hint}"
        if isinstance(value, ValueIf) and any(other.split(".")[0] != section for other in value.when):
            yield f"proposes: {path!r} depends on {', '.join(value.when)}, expected settings of {section!r}"


def option_problems(
    kind: type[Any], given: Mapping[str, Any], *, key: str, names: Collection[str] | None = None
) -> list[Reason]:
    """A reason for each unknown option and for each value of another type than its field.

    kind: dataclass with the fields.  key: path of the options.  names: fields that are options; None is all of them.
    """
    # Not above: plan matching imports this module, and must stay light.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    known = [item.name for item in fields(kind)] if names is None else list(names)
    typed: Any = OmegaConf.structured(kind)
    # Frozen dataclasses are read-only.
    OmegaConf.set_readonly(typed, False)
    reasons: list[Reason] = []
    for name, value in given.items():
        if name not in known:
            text = f"{kind.__name__} has no such option{did_you_mean(name, known) or '.'} It has "
            reasons.append(Reason(key=f"{key}.{name}", text=f"{text}{', '.join(sorted(known)) or 'none'}."))
            continue
        try:
            OmegaConf.update(typed, name, value)
            converted: Any = OmegaConf.to_container(typed)
        except OmegaConfBaseException:
            converted = {}
        if name not in converted or converted[name] != value:
            expected = next(item.type for item in fields(kind) if item.name == name)
            reasons.append(Reason(key=f"{key}.{name}", text=f"got {value!r}, expected a value of type {expected}."))
    return reasons
