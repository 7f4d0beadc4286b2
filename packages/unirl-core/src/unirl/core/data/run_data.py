"""The files that a run reads: its prompts, checked against the plan before anything is built, and hashes of all."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from ..names import did_you_mean
from ..types.data import Prompt
from ..types.sampling import LatentSamplingConfig, TextSamplingConfig
from .columns import Columns
from .hub import HUB, hub_rows
from .prompts import REMOTE_PATHS, read_prompts, refuse
from .rows import data_files, kind_of

if TYPE_CHECKING:
    from ..specs.part_config import EnvironmentConfig, RewardConfig
    from ..specs.plan import Choice, Plan, Stage
    from ..specs.spec import EnvironmentSpec, RewardSpec

__all__ = ["RunData", "data_hash", "read_data"]

NO_SETTINGS = ("kind", "options")
"""Sampling fields that may be metadata: multiple-choice questions have `options`."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The prompts of a run, and hashes of the files it reads."""

    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    hashes: Mapping[str, str]
    """Config key of the prompts, and of each file that a part reads -> SHA-256 of its content, of a folder that of
    names and contents; that of each service that a part uses -> its version."""


def read_data(plan: Plan) -> RunData:
    """Read the prompt files of a plan and check their number, metadata and media; hash them and the files of parts.

    Raises DataError with the file or key.
    """
    cache = Path(plan.data.cache or "~/.cache/unirl/data").expanduser()
    columns = Columns(
        names=plan.data.columns,
        media=cache / "images",
        takes={role for stage in plan.stages for role in (*stage.takes, *stage.stored)},
    )
    settings = _settings(plan)
    files: dict[str, Path] = {}
    read: dict[str, Sequence[Prompt]] = {}
    for key, name in (("data.train", plan.data.train), ("data.eval", plan.data.eval)):
        if not name:
            continue
        with _under(key):
            files[key] = hub_rows(name, cache=cache) if name.startswith(HUB) else Path(name).expanduser()
            read[key] = read_prompts(
                files[key],
                prompt_key=plan.data.prompt_key,
                columns=replace(columns, own_names=key == "data.eval"),
                settings=settings,
            )
    prompts = read["data.train"]
    if len(prompts) < plan.data.prompts_per_step:
        raise DataError(
            f"data.prompts_per_step: got {plan.data.prompts_per_step}; {plan.data.train} has only {len(prompts)} "
            "prompts."
        )
    for stage in plan.stages:
        _check_stored(stage, prompts, plan)
        with _under("data.train"):
            refuse([(row.where, problem) for row in prompts if (problem := _teacher_problem(row, stage))])
    for key, rows in read.items():
        with _under(key):
            refuse([(row.where, problem) for row in rows if (problem := _problem(row, plan))])
    versions: dict[str, str] = {}
    for choice in plan.choices:
        with choice.attributed():
            files |= {f"{choice.key}{key}": file for key, file in choice.config.read_files().items()}
            versions |= {f"{choice.key}{key}": version for key, version in choice.config.read_versions().items()}
    return RunData(prompts=prompts, held_out=read.get("data.eval", ()), hashes=_hashes(files) | versions)


@contextmanager
def _under(key: str) -> Generator[None]:
    """Errors of a prompt file begin with its key, unless they are about another."""
    try:
        yield
    except DataError as error:
        if str(error).startswith("data."):
            raise
        raise DataError(f"{key}: {error}") from error.__cause__


def _settings(plan: Plan) -> dict[str, str]:
    """Name -> recipe key of each setting that a row cannot set, without names that a reward reads."""
    names = {"seed": "run.seed", "samples_per_prompt": "data.samples_per_prompt"}
    for sampling in (LatentSamplingConfig, TextSamplingConfig):
        names |= {item.name: f"sampling.{item.name}" for item in fields(sampling) if item.name not in NO_SETTINGS}
    read = {name for choice in plan.rewards.values() for name in (*_metadata(choice), *choice.spec.metadata_kinds)}
    read |= {name for choice in _environments(plan) for name in _metadata(choice)}
    return {name: key for name, key in names.items() if name not in read}


def _environments(plan: Plan) -> list[Choice[EnvironmentSpec, EnvironmentConfig]]:
    return [stage.environment for stage in plan.stages if stage.environment is not None]


def _metadata(
    choice: Choice[RewardSpec, RewardConfig] | Choice[EnvironmentSpec, EnvironmentConfig],
) -> tuple[str, ...]:
    """Metadata that a reward, or an environment, reads of every row."""
    with choice.attributed():
        return (*choice.spec.metadata, *choice.config.required_metadata())


def _problem(row: Prompt, plan: Plan) -> str:
    """Why the parts of a plan cannot take a row; empty where they can."""
    if problem := _media_problem(row, plan):
        return f"{problem}. Change the prompt file, or choose another model or engine."
    for environment in _environments(plan):
        if missing := [name for name in _metadata(environment) if name not in row.metadata]:
            guess = did_you_mean(missing[0], row.metadata) or "."
            return (
                f"got no metadata {missing[0]!r}, which {environment.key} reads; the prompt has "
                f"{sorted(row.metadata) or 'none'}{guess}"
            )
    for reward, choice in plan.rewards.items():
        if missing := [name for name in _metadata(choice) if name not in row.metadata]:
            guess = did_you_mean(missing[0], [*row.metadata, *choice.config.other_names])
            return (
                f"got no metadata {missing[0]!r}, which reward.{reward} reads; the prompt has "
                f"{sorted(row.metadata) or 'none'}{guess or '.'}"
            )
        for name, kinds in choice.spec.metadata_kinds.items():
            if name in row.metadata and (kind := kind_of(row.metadata[name])) not in kinds:
                return f"metadata {name!r} is {kind}; reward.{reward} expects {' or '.join(kinds)}."
    return ""


def _teacher_problem(row: Prompt, stage: Stage) -> str:
    """Why a stage with several teachers has none for a prompt; empty where it has one."""
    names = [teacher.name for teacher in stage.teachers]
    name = row.metadata.get("teacher")
    if len(names) < 2 or name in names:
        return ""
    got = "no metadata 'teacher'" if name is None else f"the metadata 'teacher' {name!r}"
    guess = did_you_mean(str(name), names) if name is not None else ""
    return f"got {got}, expected one of {', '.join(map(repr, names))}, stages.{stage.name}.teachers{guess or '.'}"


def _media_problem(row: Prompt, plan: Plan) -> str:
    """Media that no model or engine takes, or that a model needs and a row lacks."""
    given = [ref.role for ref in row.media]
    stages = plan.stages
    taken = sorted({role for stage in stages for role in stage.takes})
    models = " or ".join(dict.fromkeys(repr(stage.model.name) for stage in stages))
    problem = ""
    if other := [role for role in given if role not in taken]:
        expected = " or ".join(taken) or "none"
        problem = f"got media of role {other[0]!r}, expected {expected}, which model {models} takes"
    for stage in stages:
        problem = problem or _of_stored(row, stage)
        needs = {role: use for role, use in sorted(_roles(stage).items()) if use != "takes"}
        above = [plan.stage(name).medium for name in (*stage.settings.shows, *([stage.parent] if stage.parent else []))]
        made = {stage.parent_role} if "image" in above and not stage.continues else set[str]()
        unfit = [
            role
            for role in needs
            if role not in made and (role not in given or (needs[role] == "needs one" and given.count(role) > 1))
        ]
        here = [role for role in given if role in _roles(stage)]
        unread = [ref for ref in row.media if ref.role in here and ref.modality not in stage.model.spec.reads]
        if unread and not problem:
            expected = " or ".join(stage.model.spec.reads)
            problem = f"got {unread[0].modality} {unread[0].uri!r}, expected {expected}, which model "
            problem += f"{stage.model.name!r} reads"
        elif unfit and not problem:
            problem = f"got {given.count(unfit[0]) or 'no'} media of role {unfit[0]!r}, of which model "
            problem += f"{stage.model.name!r} needs one"
        elif here and not problem and (why := stage.model.spec.lacks_media(stage.engine.spec)):
            problem = f"got media of role {here[0]!r}, but {why}"
    return problem


def _roles(stage: Stage) -> Mapping[Any, str]:
    """Roles of media that the track of a stage is generated from, and how, see `ModelSpec.inputs`."""
    return stage.model.spec.inputs.get(stage.track, {})


def _check_stored(stage: Stage, prompts: Sequence[Prompt], plan: Plan) -> None:
    """Raise DataError if no prompt at all has stored samples for a stage that reads them."""
    roles = stage.stored
    if not roles or stage.engine.config.read_files():
        return
    # Media of other roles are a mistake in the rows.
    if not any(row.media or roles & row.metadata.keys() for row in prompts):
        key = stage.engine.key + (".path" if "path" in vars(stage.engine.config) else "")
        raise DataError(
            f"{key}: got no stored samples for engine {stage.engine.name!r}: no row of {plan.data.train} has any. "
            f"Name a file of samples here, or add {' or '.join(map(repr, sorted(roles)))} to the rows."
        )


def _of_stored(row: Prompt, stage: Stage) -> str:
    """Why a stage's engine cannot take the media of a prompt for its samples; empty where it can, or generates."""
    sets = stage.engine.spec.samples
    # An engine with its own files takes nothing from the prompts.
    if not sets or stage.engine.config.read_files():
        return ""
    stored = [ref for ref in row.media if ref.role in stage.stored]
    texts = {role: row.metadata[role] for role in stage.stored if role in row.metadata}
    roles = list(texts) if stage.medium == "text" else [str(ref.role) for ref in stored]
    if sorted(roles) not in [sorted(each) for each in sets]:
        expected = " or ".join(" and ".join(f"one {role!r}" for role in each) for each in sets)
        got = ", ".join(map(repr, roles)) or "none"
        return f"got stored samples of the roles {got}, expected {expected}, for engine {stage.engine.name!r}"
    if len(roles) > 1 and stage.samples != len(roles):
        return f"got {len(roles)} stored samples, but stage {stage.name!r} takes {stage.samples} of each prompt"
    if stage.medium == "text":
        empty = [role for role, text in texts.items() if not isinstance(text, str) or not text]
        return f"got {empty[0]} {texts[empty[0]]!r}, expected a completion, a text that is not empty" if empty else ""
    other = [ref for ref in stored if ref.modality != stage.medium]
    if other:
        return f"got {other[0].modality} {other[0].uri!r}, expected {stage.medium}, which stage {stage.name!r} makes"
    return ""


def _hashes(files: Mapping[str, Path]) -> dict[str, str]:
    result: dict[str, str] = {}
    for key, file in files.items():
        if str(file).startswith(REMOTE_PATHS):
            raise DataError(f"{key}: got the URL {file}, expected a file on this machine; download it first.")
        try:
            result[key] = data_hash(file) if key.startswith("data.") else _hash(file)
        except OSError as error:
            raise DataError(f"{key}: {file} cannot be read: {error.strerror or error}.") from error
    return result


def _hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def data_hash(path: Path) -> str:
    """SHA-256 of a file of prompts, or of the names and contents of a folder's."""
    if not path.is_dir():
        return _hash(path)
    result = hashlib.sha256()
    for file in data_files(path):
        result.update(f"{file.relative_to(path).as_posix()}\0{_hash(file)}\n".encode())
    return result.hexdigest()
