"""The subjects of claims, made from the catalog: every part and every combination, none by hand."""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from unirl.core.errors import PluginNotFound, PluginNotInstalled, RecipeError
from unirl.core.match.parts import Verdict, match_pair, match_parts, served_kinds
from unirl.core.names import did_you_mean
from unirl.core.plugins.catalog import Catalog, Found, PluginRecord
from unirl.core.plugins.registry import known_parts
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import AlgorithmSpec, BackendSpec, EngineSpec, Kind, ModelSpec, Spec

from .claims import SUBJECT_KINDS, TIERS, Claim, SubjectKind, Tier, claim_kinds

__all__ = [
    "Selection",
    "Subject",
    "common_tracks",
    "devices_of",
    "not_applicable",
    "pair_tracks",
    "subject_id",
    "subjects",
    "tracks_of",
]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Subject of claims: one plugin, one part, or parts together."""

    kind: SubjectKind
    parts: tuple[Found, ...] = ()
    """The part that the claims are about comes first."""
    plugin: PluginRecord | None = None
    """The plugin of a `plugin` subject."""
    device: str = "cpu"
    refused: str = ""
    """Why these parts do not go together; every claim about them is then n/a, whatever the device."""

    @property
    def id(self) -> str:
        """Unique among subjects of its kind, see `subject_id`."""
        return subject_id(
            [self.plugin.dist] if self.plugin else [result.spec.name for result in self.parts], self.device
        )

    @property
    def own(self) -> Spec | None:
        """The part that the claims are about."""
        return self.parts[0].spec if self.parts else None

    @property
    def dists(self) -> tuple[str, ...]:
        return (self.plugin.dist,) if self.plugin else tuple(sorted({result.dist for result in self.parts}))

    @property
    def programs(self) -> tuple[EngineSpec, ...]:
        """The engines that run in a separate Python environment."""
        specs = (result.spec for result in self.parts)
        return tuple(spec for spec in specs if isinstance(spec, EngineSpec) and spec.environment)

    @property
    def tracks(self) -> tuple[str, ...]:
        """Kinds of tracks that it is tried on, latents first; none where it has to do with neither."""
        specs = [part.spec for part in self.parts]
        models = [spec for spec in specs if isinstance(spec, ModelSpec)]
        engines = [spec for spec in specs if isinstance(spec, EngineSpec)]
        pairs = [pair_tracks(model, engine) for model in models for engine in engines]
        return common_tracks([*pairs, *map(tracks_of, specs)])

    def found(self, kind: Kind) -> Found:
        """The part of a kind. The kind of the subject says which there are."""
        return next(result for result in self.parts if result.spec.kind == kind)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The selected subjects and claims; empty is all."""

    names: Mapping[Kind, tuple[str, ...]] = field(default_factory=lambda: dict[Kind, tuple[str, ...]]())
    """Parts by kind. A subject is chosen when it has one of them and contradicts none."""
    plugins: tuple[str, ...] = ()
    """Dists, of which one must provide a part of the subject."""
    kinds: tuple[SubjectKind, ...] = ()
    claims: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    """What to leave out: subjects as `kind:id`, with wildcards (`engine:sglang+sd3`, `engine:*+wan22`), and claims by
    name."""

    @property
    def is_narrow(self) -> bool:
        """Whether parts or dists are named: then everything else is left out."""
        return bool(self.plugins or any(self.names.values()))

    def options(self, prefix: str = "--") -> tuple[str, ...]:
        """The selection as options: `--engine=trainside`."""
        named = [*self.names.items(), ("plugin", self.plugins), ("kind", self.kinds), ("claim", self.claims)]
        return tuple(
            f"{prefix}{name}={value}" for name, values in [*named, ("without", self.without)] for value in values
        )

    def check(self, catalog: Catalog) -> None:
        """Raises PluginNotFound, PluginNotInstalled or PluginBroken for a name that cannot be tried."""
        for kind, names in self.names.items():
            for name in names:
                catalog.get(kind, name)
        installed = [record.dist for record in catalog.records]
        for dist in self.plugins:
            if dist in installed:
                continue
            if any(part.dist == dist and not part.planned for part in known_parts().parts):
                raise PluginNotInstalled(f"plugin {dist!r} is not installed. Install it: `pip install {dist}`.")
            raise PluginNotFound(f"plugin {dist!r} is not installed{did_you_mean(dist, installed) or '.'}")

    def covers(self, claim: Claim, *, tier: Tier) -> bool:
        """Whether a claim is selected."""
        is_named = not self.claims or claim.name in self.claims
        return TIERS.index(claim.tier) <= TIERS.index(tier) and is_named and claim.name not in self.without

    def takes(self, subject: Subject, *, dist_of: Mapping[tuple[Kind, str], str]) -> bool:
        """Whether a subject is among the selected parts. `without` is not looked at.

        dist_of: (kind, name) -> the dist that provides it, for the subjects that are plugins.
        """
        if self.kinds and subject.kind not in self.kinds:
            return False
        if self.plugins and not set(self.plugins) & set(subject.dists):
            return False
        asked: dict[Kind, tuple[str, ...]] = {kind: names for kind, names in self.names.items() if names}
        if not asked:
            return True
        if subject.plugin is not None:
            providers = {dist for (kind, name), dist in dist_of.items() if name in asked.get(kind, ())}
            return subject.plugin.dist in providers
        there: dict[Kind, str] = {result.spec.kind: result.spec.name for result in subject.parts}
        common: list[Kind] = [kind for kind in asked if kind in there]
        return bool(common) and all(there[kind] in asked[kind] for kind in common)

    def leaves_out(self, subject: Subject, *, tier: Tier) -> bool:
        """Whether a subject that `takes` accepts, because one of its parts is named, is not selected itself: its parts
        do not go together, or, below tier full, it is a combination with an external engine."""
        if not self.is_narrow:
            return False
        if subject.refused:
            return not all(result.spec.name in self.names.get(result.spec.kind, ()) for result in subject.parts)
        return tier != "full" and not all(
            engine.name in self.names.get("engine", ()) or subject.found("engine").dist in self.plugins
            for engine in subject.programs
        )


def devices_of(tier: Tier) -> tuple[str, ...]:
    """Devices that parts are tested on at a tier."""
    return ("cpu",) if tier in ("static", "tiny") else ("cpu", "cuda")


def subjects(catalog: Catalog, selection: Selection | None = None, *, tier: Tier = "tiny") -> list[Subject]:
    """Every selected subject, in a fixed order: once on each device, except for plugins and for parts that do not
    go together, which have none.

    Cells are models, engines and algorithms on one backend: UniRL's own, the first by name. Another backend meets each
    of them once, unless it is selected. Below tier full, a run of everything tries an engine once with each model and
    once with each thing that algorithms ask it for.
    """
    selection = selection or Selection()
    dist_of: dict[tuple[Kind, str], str] = {(f.spec.kind, f.spec.name): f.dist for f in catalog.parts()}
    plain = [*_plugins(catalog), *_single(catalog), *_pairs(catalog), *_cells(catalog)]
    names = [f"{subject.kind}:{subject.id}" for subject in plain]
    without = [name for name in selection.without if ":" in name or name not in claim_kinds()]
    if unknown := sorted(pattern for pattern in without if not fnmatch.filter(names, pattern)):
        raise RecipeError(
            f"--without: got {unknown[0]!r}, which is neither a subject nor a claim. Expected KIND:ID, as reports name "
            "them or with wildcards, or the name of a claim; `unirl conformance --claims` lists them."
        )
    chosen = [
        subject
        for subject in plain
        if selection.takes(subject, dist_of=dist_of) and not selection.leaves_out(subject, tier=tier)
    ]
    chosen = _without(chosen, _repeats_of_backends(chosen, selection))
    if tier != "full" and not selection.is_narrow:
        chosen = _without(chosen, _repeats_of_engines(chosen))
    # Last, so that no repeat takes the place of what is left out.
    chosen = [
        subject
        for subject in chosen
        if not any(fnmatch.fnmatchcase(f"{subject.kind}:{subject.id}", pattern) for pattern in selection.without)
    ]
    placed = [
        Subject(kind=s.kind, parts=s.parts, plugin=s.plugin, device=device, refused=s.refused)
        for s in chosen
        for device in (("cpu",) if s.kind == "plugin" or s.refused else devices_of(tier))
    ]
    return sorted(placed, key=lambda s: (SUBJECT_KINDS.index(s.kind), s.id))


def subject_id(names: Iterable[str], device: str) -> str:
    """Readable, and unique among subjects of a kind: `trainside+sd3`, with `@cuda` on a GPU."""
    return "+".join(names) + ("" if device == "cpu" else f"@{device}")


def common_tracks(tracks: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Kinds of tracks that several parts share, in the order of the first; parts with an empty tuple work with any."""
    stated = [each for each in tracks if each]
    return tuple(track for track in stated[0] if all(track in others for others in stated)) if stated else ()


def pair_tracks(model: ModelSpec, engine: EngineSpec) -> tuple[str, ...]:
    """Kinds of tracks that an engine generates with a model, latents first: its bridge may serve some alone."""
    served = served_kinds(model, engine)
    return tuple(kind for kind in common_tracks([tracks_of(model), tracks_of(engine)]) if kind in served)


def tracks_of(spec: Spec) -> tuple[str, ...]:
    """Kinds of tracks that a part has or is tried on, latents first; none for parts that work with any."""
    if isinstance(spec, ModelSpec):
        return tuple(sorted(set(spec.tracks.values())))
    if isinstance(spec, AlgorithmSpec):
        return ("text",) if spec.needs.track == "text" else ("latent",)
    if isinstance(spec, EngineSpec):
        kinds = (("latent", Cap.LATENT_ROLLOUT), ("text", Cap.TEXT_ROLLOUT))
        return tuple(kind for kind, cap in kinds if cap in spec.capabilities)
    return ()


def not_applicable(claim: Claim, subject: Subject) -> str:
    """Why a claim means nothing for a subject, or an empty string."""
    if subject.refused:
        return subject.refused
    if subject.own is not None:
        reason = _unpromised(subject.own, claim.proves)
        if reason:
            return reason
    tracks = subject.tracks
    if tracks and claim.track not in ("any", *tracks):
        spec = next((result.spec for result in subject.parts if tracks_of(result.spec) == tracks), None)
        if spec is None:
            return f"the claim is about {claim.track} tracks; these parts together serve {', '.join(tracks)}"
        verb = "has" if isinstance(spec, ModelSpec) else "is tried on"
        return f"the claim is about {claim.track} tracks; {spec.kind} {spec.name!r} {verb} {', '.join(tracks_of(spec))}"
    for kind, caps in claim.needs.items():
        reason = _unpromised(subject.found(kind).spec, caps)
        if reason:
            return reason
    return ""


def _plugins(catalog: Catalog) -> Iterator[Subject]:
    for record in catalog.records:
        # A single file has no dist that claims could look at; its parts are tried.
        if record.status != "disabled" and not record.is_file:
            yield Subject(kind="plugin", plugin=record)


def _single(catalog: Catalog) -> Iterator[Subject]:
    for kind in ("model", "algorithm", "backend", "reward", "environment", "tracker", "launcher", "transport"):
        for result in _of(catalog, kind):
            yield Subject(kind=kind, parts=(result,))


def _pairs(catalog: Catalog) -> Iterator[Subject]:
    for engine, model in itertools.product(_of(catalog, "engine"), _of(catalog, "model")):
        verdict = match_pair(model=cast(ModelSpec, model.spec), engine=cast(EngineSpec, engine.spec))
        yield Subject(kind="engine", parts=(engine, model), refused=_sentences(verdict) or _reads_samples(engine))


def _cells(catalog: Catalog) -> Iterator[Subject]:
    kinds: Sequence[Kind] = ("model", "engine", "algorithm", "backend")
    for model, engine, algorithm, backend in itertools.product(*(_of(catalog, kind) for kind in kinds)):
        verdict = match_parts(
            model=cast(ModelSpec, model.spec),
            engine=cast(EngineSpec, engine.spec),
            algorithm=cast(AlgorithmSpec, algorithm.spec),
            backend=cast(BackendSpec, backend.spec),
        )
        refused = _sentences(verdict) or _reads_samples(engine)
        yield Subject(kind="cell", parts=(model, engine, algorithm, backend), refused=refused)


def _without(chosen: Sequence[Subject], cells: Collection[str]) -> list[Subject]:
    return [subject for subject in chosen if subject.kind != "cell" or subject.id not in cells]


def _repeats_of_backends(chosen: Sequence[Subject], selection: Selection) -> set[str]:
    """Cells of further backends, except those that first bring a model, an engine or an algorithm together with one.

    What a backend does with any loss is claimed of the backend itself.
    """
    cells = [one for one in chosen if one.kind == "cell" and not one.refused]
    backends = sorted({(not part.dist.startswith("unirl-"), part.spec.name) for part in _backends(cells)})
    selected = {
        part.spec.name
        for part in _backends(cells)
        if part.spec.name in selection.names.get("backend", ()) or part.dist in selection.plugins
    }
    repeats: set[str] = set()
    for _, backend in backends[1:]:
        if backend in selected:
            continue
        met: set[tuple[str, str]] = set()
        own = [one for one in cells if one.found("backend").spec.name == backend]
        # In-process engines first, so that an engine that has to be started is started only for its own sake.
        for cell in sorted(own, key=lambda one: (bool(one.programs), one.id)):
            parts: set[tuple[str, str]] = {(part.spec.kind, part.spec.name) for part in cell.parts}
            if parts <= met:
                repeats.add(cell.id)
            met |= parts
    return repeats


def _backends(cells: Sequence[Subject]) -> Iterator[Found]:
    return (cell.found("backend") for cell in cells)


def _repeats_of_engines(chosen: Sequence[Subject]) -> set[str]:
    """Cells that bring no engine together with another model, or with an algorithm that asks it for something else.

    An engine knows nothing of losses: algorithms differ to it in what their samples must bring. Each model, and each of
    what algorithms ask for, is tried once with each engine and backend.
    """
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
    cells = [subject for subject in chosen if subject.kind == "cell" and not subject.refused]
    for cell in cells:
        needs = cast(AlgorithmSpec, cell.found("algorithm").spec).needs
        asked = (needs.track, needs.trajectory, needs.log_probs, needs.sampler, needs.stochastic)
        model, engine, backend = (cell.found(kind).spec.name for kind in ("model", "engine", "backend"))
        for met in (model, asked):
            alike[engine, backend, met].append(cell.id)
    # By its own name, so that a further model or algorithm does not change which ones the others are tried with.
    return {cell.id for cell in cells} - {min(ids, key=_digest) for ids in alike.values()}


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _reads_samples(engine: Found) -> str:
    """Why claims about generating do not apply to an engine; empty where they do."""
    spec = cast(EngineSpec, engine.spec)
    return f"engine {spec.name!r} reads stored samples; it generates none." if spec.samples else ""


def _of(catalog: Catalog, kind: Kind) -> list[Found]:
    return [result for result in catalog.parts() if result.spec.kind == kind]


def _sentences(verdict: Verdict) -> str:
    return " ".join(str(reason) for reason in verdict.reasons)


def _unpromised(spec: Spec, caps: tuple[Cap, ...]) -> str:
    for cap in caps:
        if cap not in spec.capabilities:
            return f"the claim is about {cap.value!r}; {spec.kind} {spec.name!r} does not provide it"
    return ""
