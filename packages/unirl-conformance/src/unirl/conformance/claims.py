"""Claims: statements about parts, each an ordinary test function in `unirl.conformance.suite`."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

if TYPE_CHECKING:
    from unirl.core.specs.capability import Cap
    from unirl.core.specs.spec import Kind

__all__ = [
    "SUBJECT_KINDS",
    "TIERS",
    "Claim",
    "SubjectKind",
    "Tier",
    "all_claims",
    "claim",
    "claim_kinds",
    "claim_of",
    "claims_in",
    "suite_modules",
]

SubjectKind = Literal[
    "model",
    "engine",
    "algorithm",
    "backend",
    "reward",
    "environment",
    "tracker",
    "launcher",
    "transport",
    "cell",
    "plugin",
]
"""Kinds of subjects, in the order of reports: first the parts, last the dists that provide them. An `engine` is tested
with each model; a `cell` is model, engine, algorithm and backend."""
SUBJECT_KINDS: tuple[SubjectKind, ...] = get_args(SubjectKind)

Tier = Literal["static", "tiny", "gpu", "full"]
"""Scope of a run, each including the previous: build nothing; miniatures on the CPU; also on a GPU; also claims that
take minutes."""
TIERS: tuple[Tier, ...] = get_args(Tier)

F = TypeVar("F", bound=Callable[..., None])
_ATTRIBUTE = "__unirl_claim__"
_HELP = re.compile(r"^If it fails:?", re.MULTILINE)
"""A docstring may continue after it, as in "If it fails while the other claims hold: look at ..."."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim, as its test function states it."""

    name: str
    """Name of the test function without `test_`, with dashes."""
    kind: SubjectKind
    proves: tuple[Cap, ...] = ()
    """Capabilities of the subject's own part. Where it does not provide one, the claim is n/a."""
    needs: Mapping[Kind, tuple[Cap, ...]] = field(default_factory=dict["Kind", "tuple[Cap, ...]"])
    """Capabilities that other parts of the subject must provide for the claim to mean something."""
    track: Literal["latent", "text", "any"] = "latent"
    """Kind of track that it is about. Where the subject's model has none of it, or its algorithm trains on another, the
    claim is n/a."""
    tier: Tier = "tiny"
    own_engine: bool = False
    """Whether it closes or damages its engine, or is about a new one. Otherwise an external engine is
    started once for many claims."""
    meaning: str = ""
    """The docstring up to "If it fails:"."""
    if_it_fails: str = ""
    """Advice on where to look."""


def claim(
    kind: SubjectKind,
    *,
    proves: Cap | tuple[Cap, ...] = (),
    needs: Mapping[Kind, tuple[Cap, ...]] | None = None,
    track: Literal["latent", "text", "any"] = "latent",
    tier: Tier = "tiny",
    own_engine: bool = False,
) -> Callable[[F], F]:
    """Make a test function a claim about every subject of a kind.

    Its docstring says what the claim means and, after "If it fails:", where to look; it takes the fixture `case`, an
    object of `unirl.conformance.fixtures` that has what claims of this kind need.
    """

    def mark(function: F) -> F:
        meaning, *help_text = _HELP.split(inspect.getdoc(function) or "", maxsplit=1)
        result = Claim(
            name=_name(function.__name__),
            kind=kind,
            proves=proves if isinstance(proves, tuple) else (proves,),
            needs=needs or {},
            track=track,
            tier=tier,
            own_engine=own_engine,
            meaning=" ".join(meaning.split()),
            if_it_fails=" ".join("".join(help_text).split()),
        )
        setattr(function, _ATTRIBUTE, result)
        return function

    return mark


def claim_of(function: object) -> Claim | None:
    """The claim that a test function is, or None."""
    return getattr(function, _ATTRIBUTE, None)


def all_claims(kinds: Collection[SubjectKind] = SUBJECT_KINDS) -> list[Claim]:
    """Every claim about these kinds of subjects, by kind and name. All kinds but `plugin` import torch.

    Claims of a kind are in `suite/test_<kind>*.py`.
    """
    result: dict[str, Claim] = {}
    for module in suite_modules(kinds):
        for value in vars(import_module(f"{__package__}.suite.{module}")).values():
            stated = claim_of(value)
            if stated is not None:
                assert result.setdefault(stated.name, stated) is stated, f"two claims are called {stated.name!r}"
    return sorted(result.values(), key=lambda one: (SUBJECT_KINDS.index(one.kind), one.name))


def suite_modules(kinds: Collection[SubjectKind] = SUBJECT_KINDS) -> list[str]:
    """Names of the modules of the suite that hold the claims about these kinds of subjects."""
    from . import suite

    prefixes = tuple(f"test_{kind}" for kind in kinds)
    return [module.name for module in pkgutil.iter_modules(suite.__path__) if module.name.startswith(prefixes)]


def claim_kinds() -> dict[str, SubjectKind]:
    """Name of every claim -> the kind of its subjects, read from the sources: nothing is imported."""
    result: dict[str, SubjectKind] = {}
    for file in files(f"{__package__}.suite").iterdir():
        if file.name.startswith("test_") and file.name.endswith(".py"):
            result |= claims_in(file.read_text(encoding="utf-8"))
    return result


def claims_in(source: str) -> dict[str, SubjectKind]:
    """The claims that this Python source states: name -> kind of subject. Raises SyntaxError when it is none."""
    result: dict[str, SubjectKind] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            for mark in node.decorator_list:
                match mark:
                    case ast.Call(func=ast.Name(id="claim"), args=[ast.Constant(value=str(kind)), *_]):
                        result |= {_name(node.name): known for known in SUBJECT_KINDS if known == kind}
                    case _:
                        pass
    return result


def _name(function: str) -> str:
    return function.removeprefix("test_").replace("_", "-")
