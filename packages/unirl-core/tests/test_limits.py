"""Limits of settings: what a field takes, what the one message says, and that every shipped limit is held."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from omegaconf import OmegaConf
from unirl.core.errors import RecipeError
from unirl.core.limits import LARGEST_INT, Limit, Reason, broken_limits, limit, limit_of, one_of
from unirl.core.plugins.catalog import Catalog
from unirl.core.specs import config as schema
from unirl.core.specs.check import check_config
from unirl.core.specs.config import RunConfig
from unirl.core.specs.part_config import PartConfig
from unirl.core.specs.spec import KINDS
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig

# Of every part that is installed.

SECTIONS = (
    schema.RunConfig,
    schema.DataConfig,
    LatentSamplingConfig,
    TextSamplingConfig,
    schema.AdvantageConfig,
    schema.TrainConfig,
    schema.EvalConfig,
)


@dataclass
class Inner:
    rate: float = limit(0.5, above=0, below=1)
    free: float = 1.0


@dataclass
class Toy(PartConfig):
    count: int = limit(4, least=1, most=8)
    bound: float | None = limit(None, above=0, hint="null is no bound.")
    mode: str = one_of("fast", "slow", default="fast")
    pair: list[float] = limit([0.1, 0.2], least=0, below=1, length=2)
    inner: Inner = field(default_factory=Inner)
    shares: dict[str, int] = limit(dict[str, int](), least=1, hint="Leave it out for none.")
    options: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    big: int = 0

    def problems(self, plan: object, stage: object) -> Iterator[Reason]:
        if self.mode == "slow" and self.count > 2:
            yield Reason(key=".count", text="slow takes 2 at most.")


@dataclass
class Child(Toy):
    count: int = 7


@dataclass
class Wider(Toy):
    count: int = limit(4, least=0)


def said(config: object) -> list[str]:
    return [str(reason) for reason in broken_limits(config, key="toy")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "toy.count: got 0, expected 1 to 8. The default is 4."),
        ({"count": True}, "toy.count: got True, expected 1 to 8. The default is 4."),
        ({"bound": -1.0}, "toy.bound: got -1.0, expected more than 0, or null. null is no bound."),
        ({"bound": math.inf}, "toy.bound: got inf, expected a finite number, more than 0, or null. null is no bound."),
        ({"shares": {"a": 1, "b": 0}}, "toy.shares.b: got 0, expected 1 or more. Leave it out for none."),
        ({"mode": "slwo"}, "toy.mode: got 'slwo', expected one of fast, slow; did you mean 'slow'?"),
        ({"mode": ""}, "toy.mode: got '', expected one of fast, slow. The default is fast."),
        (
            {"pair": [0.1]},
            "toy.pair: got [0.1], expected 2 values, each 0 or more and less than 1. The default is [0.1, 0.2].",
        ),
        (
            {"pair": []},
            "toy.pair: got [], expected 2 values, each 0 or more and less than 1. The default is [0.1, 0.2].",
        ),
        (
            {"inner": Inner(rate=1.0)},
            "toy.inner.rate: got 1.0, expected more than 0 and less than 1. The default is 0.5.",
        ),
        ({"inner": Inner(free=math.nan)}, "toy.inner.free: got nan, expected a finite number."),
        ({"options": {"a": {"b": [1.0, math.inf]}}}, "toy.options.a.b[1]: got inf, expected a finite number."),
        ({"big": 2**64}, f"toy.big: got {2**64}, expected a whole number of at most {2**63 - 1}."),
    ],
)
def test_the_one_message_says_what_was_found_what_is_expected_and_what_to_do(
    changes: dict[str, Any], message: str
) -> None:
    assert said(Toy(**changes)) == [message]


def test_what_is_within_the_limits_passes_and_none_where_the_type_has_it() -> None:
    assert said(Toy()) == []
    assert said(Toy(count=8, bound=1e-9, pair=[0.0, 0.999])) == []
    assert said(Toy(count=None)) == ["toy.count: got None, expected 1 to 8. The default is 4."]  # type: ignore[arg-type]


def test_a_class_with_another_default_keeps_the_limits_and_one_that_declares_others_has_those() -> None:
    assert limit_of(Child, "count") == Limit(least=1, most=8)
    assert said(Child(count=9)) == ["toy.count: got 9, expected 1 to 8. The default is 7."]
    assert said(Wider(count=0)) == said(Wider(count=9)) == []


def test_a_default_out_of_its_own_limits_is_a_mistake_of_whoever_wrote_it() -> None:
    with pytest.raises(AssertionError, match="0 is not 1 or more"):
        limit(0, least=1)
    with pytest.raises(AssertionError, match="'x' is not one of a, b"):
        one_of("a", "b", default="x")


def test_lists_of_two_configs_are_two_lists() -> None:
    one, other = Toy(), Toy()
    one.pair.append(3.0)
    assert other.pair == [0.1, 0.2]


def test_limits_live_in_structured_configs() -> None:
    node = OmegaConf.structured(Child)
    node.count, node.pair = 9, [0.5]
    config = OmegaConf.to_object(node)
    assert isinstance(config, Child) and config.use == ""
    assert [reason.key for reason in broken_limits(config, key="")] == ["count", "pair"]


def test_a_build_refuses_limits_first_and_relations_once_they_hold() -> None:
    check_config(Toy(), key="engine")
    with pytest.raises(RecipeError, match=r"^engine\.count: got 9, expected 1 to 8\. The default is 4\.$"):
        check_config(Toy(count=9, mode="slow"), key="engine")
    with pytest.raises(RecipeError, match=r"^engine\.count: slow takes 2 at most\.$"):
        check_config(Toy(mode="slow"), key="engine")


@pytest.mark.parametrize(
    "changes",
    [
        *({"seed": 2**64}, {"seed": 2**63}, {"seed": -1}, {"seed": 10**400}),
        *({"threads": 100_000}, {"threads": -1}, {"max_steps": 10**23}, {"max_steps": 10**400}),
    ],
)
def test_numbers_that_no_run_can_use_are_refused(changes: dict[str, int]) -> None:
    (reason,) = broken_limits(RunConfig(**changes), key="run")
    assert reason.key == f"run.{next(iter(changes))}"


def test_the_largest_seed_fits_into_what_noise_is_keyed_with() -> None:
    assert list(broken_limits(RunConfig(seed=LARGEST_INT), key="run")) == []


def shipped() -> dict[str, type[Any]]:
    """Every config dataclass that a recipe can have: the sections, and those of all parts that are installed."""
    catalog = Catalog.discover()
    targets = {catalog.get(kind, name).spec.config for kind in KINDS for name in catalog.names(kind)}
    classes = [*SECTIONS, *(catalog.resolve(target) for target in sorted(targets))]
    return {f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes}


SHIPPED = shipped()


def outside(bounds: Limit, default: Any) -> list[Any]:
    """Values next to the limits and beyond, each of them refused."""
    values: list[Any] = []
    if bounds.choices:
        values += ["no such choice", 99]
    else:
        values += [math.nan, math.inf, -math.inf]
    is_whole = isinstance(default, int) and all(isinstance(bound, int | None) for bound in (bounds.least, bounds.most))
    for value, below in ((bounds.above, None), (bounds.least, -1), (bounds.below, None), (bounds.most, 1)):
        if value is not None and below is None:
            values.append(value)
        elif value is not None and below is not None:
            values.append(value + below if is_whole else math.nextafter(value, below * math.inf))
    if bounds.length is not None:
        inside = bounds.least if default is None else default[0]
        short, long = [inside] * (bounds.length - 1), [inside] * (bounds.length + 1)
        return [*([*short, value] for value in values), short, long]
    return [[value] for value in values] if isinstance(default, list) else values


def settings(config: Any, key: str = "") -> Iterator[tuple[str, Any, Any, str]]:
    """Key, config and name of every field of a config, nested ones as well."""
    for item in dataclasses.fields(config):
        path, value = f"{key}.{item.name}" if key else item.name, getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            yield from settings(value, path)
        else:
            yield path, config, value, item.name


@pytest.mark.parametrize("cls", SHIPPED.values(), ids=SHIPPED)
def test_every_limit_of_every_shipped_config_is_held_on_both_sides(cls: type[Any]) -> None:
    whole = cls()
    assert list(broken_limits(whole, key="here")) == [], "its own defaults"
    for path, config, default, name in settings(whole):
        bounds = limit_of(type(config), name)
        # A number without a declared limit is refused where it is none.
        is_number = isinstance(default, float) and not isinstance(default, bool)
        wrong = outside(bounds, default) if bounds else [math.nan, math.inf, -math.inf] if is_number else []
        for value in wrong:
            setattr(config, name, value)
            (reason,) = broken_limits(whole, key="here")
            assert reason.key == f"here.{path}" and reason.text.startswith(f"got {value!r}, expected "), str(reason)
        setattr(config, name, default)


@pytest.mark.parametrize("cls", SHIPPED.values(), ids=SHIPPED)
def test_every_number_of_every_shipped_config_has_a_limit_or_takes_any_finite_one(cls: type[Any]) -> None:
    free = {"guidance_scale", "reward_limit", "threshold"}
    """Numbers that may have either sign, or 0, and mean something: guidance away from the prompt, a reward to reach or
    not to pass."""
    for path, config, default, name in settings(cls()):
        of = {item.name: str(item.type) for item in dataclasses.fields(config)}[name]
        if ("int" in of or "float" in of) and name not in free and not isinstance(default, bool | str):
            assert limit_of(type(config), name) is not None, f"{cls.__name__}.{path}: {of}"
