"""Installed plugins that are broken in one way each, and one that is not."""

from __future__ import annotations

import atexit
import importlib
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

from unirl.conformance.claims import claim_kinds
from unirl.core.plugins.catalog import Catalog

from conformance_mutants.mutant import Mutant

GROUP = "planted.v1"
"""Another entry-point group than the real one, so that no other code in this process finds these plugins."""
GAP = min(name for name, kind in claim_kinds().items() if kind == "engine")
"""A claim that is not about plugins, for valid gaps."""

PLUGIN = """\
from unirl.core.specs.capability import Cap, Needs
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import (
    AlgorithmSpec, BackendSpec, EngineSpec, Gap, Miniature, ModelSpec, RewardSpec, TrackerSpec
)
{code}

PLAIN = {{"name": "{part}", "summary": "A part that is planted.", "build": "{package}_part:build"}}


@hookimpl
def unirl_trackers():
    return [TrackerSpec(**{{**PLAIN, "config": "{package}_config:Config", {tracker}}})]
"""
MODEL = """
@hookimpl
def unirl_models():
    return [ModelSpec(**{{
        **PLAIN, "config": "{package}_config:Config", "tracks": {{"image": "latent"}}, "trainable": "net",
        "capabilities": {{Cap.LATENT_STAGE}}, "path_key": "width",
        "tiny": Miniature(write="{package}_part:write"), "reference": "a.Pipeline", {model}
    }})]
"""
OTHERS = """
@hookimpl
def unirl_algorithms():
    return [AlgorithmSpec(**PLAIN, config="{package}_config:Config", needs=Needs(), paper="arXiv 2505.05470")]


@hookimpl
def unirl_backends():
    return [BackendSpec(**PLAIN, config="{package}_config:Backend")]


@hookimpl
def unirl_rewards():
    native = {{Cap.REWARD_SAMPLE}}
    return [RewardSpec(
        **PLAIN, config="{package}_config:Reward", capabilities=native, media="image", scale="share of right pixels",
        range=(0.0, 1.0),
    )]


@hookimpl
def unirl_engines():
    gap = Gap(claim="{gap}", reason="It is planted and samples nothing at all.")
    return [EngineSpec(**PLAIN, config="{package}_config:Config", gaps=(gap,))]
"""
CONFIG = '''\
{code}
from dataclasses import dataclass, field

from unirl.core.specs.part_config import BackendConfig, PartConfig, RewardConfig


@dataclass
class Inner:
    depth: int = 1
    {depth}


@dataclass
class Config(PartConfig):
    width: int = 1
    """How wide it is."""
    inner: Inner = field(default_factory=Inner)
    """Nested settings."""


@dataclass
class Backend(BackendConfig): ...


@dataclass
class Reward(RewardConfig): ...
'''
PART = """\
def build(config, **context): ...
def write(folder, *, seed): ...
def parity(folder, *, prompts, sampling, initial): ...
def needs_more(config, more): ...
"""
PARITY = '"parity": "planted_well_part:parity"'

# (claim, name of the dist, fault, and what differs: arguments of `install`)
BROKEN: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    ("the-plugin-loads", "raises", "raises when it is imported", {"code": "raise RuntimeError('no licence')"}),
    ("no-other-dist-provides-its-parts", "twin-one", "provides what another dist provides", {"part": "planted-twin"}),
    ("no-other-dist-provides-its-parts", "twin-two", "provides what another dist provides", {"part": "planted-twin"}),
    ("its-names-are-unique", "thief", "calls its tracker `swanlab`", {"part": "swanlab"}),
    ("importing-it-is-light", "heavy", "imports OmegaConf in its plugin.py", {"code": "import omegaconf"}),
    ("importing-it-is-light", "heavy-config", "imports OmegaConf with its settings", {"config": "import omegaconf"}),
    (
        "importing-it-has-no-side-effects",
        "setter",
        "sets an environment variable",
        {"code": "import os\nos.environ.setdefault('PLANTED_FLAG', '1')"},
    ),
    (
        "every-string-of-its-specs-resolves",
        "lost",
        "names a module that was renamed",
        {"tracker": '"build": "planted_lost_gone:build"'},
    ),
    (
        "every-string-of-its-specs-resolves",
        "misfit",
        "its `build` requires one more argument",
        {"tracker": '"build": "planted_misfit_part:needs_more"'},
    ),
    ("every-setting-is-documented", "terse", "has no text for a setting inside another", {"depth": ""}),
    (
        "gaps-name-claims-and-give-reasons",
        "typo",
        "declares a gap by a misspelt name",
        {"tracker": '"gaps": (Gap(claim="there-is-no-such-claim", reason="It is planted and does nothing."),)'},
    ),
    (
        "gaps-name-claims-and-give-reasons",
        "curt",
        "declares a gap with two words as reason",
        {"tracker": f'"gaps": (Gap(claim="{GAP}", reason="known issue"),)'},
    ),
    ("a-model-brings-its-miniature-and-its-reference", "untried", "cannot run its reference", {"more": MODEL}),
)
MUTANTS = [Mutant(claim=claim, name=f"planted-{name}", breaks=breaks) for claim, name, breaks, _ in BROKEN]


def install(
    folder: Path,
    name: str,
    *,
    part: str = "",
    code: str = "",
    tracker: str = "",
    more: str = "",
    model: str = "",
    config: str = "",
    depth: str = '"""How deep it goes."""',
) -> None:
    """Install a dist with one tracker, as `importlib.metadata` finds it.

    part: name of its parts, that of the dist if empty.  code, config: on top of its plugin.py and of its config.
    tracker, model: arguments of its specs that differ.  more: hooks of further parts.  depth: text of a nested setting.
    """
    package = name.replace("-", "_")
    values = {"package": package, "part": part or name, "code": code, "tracker": tracker, "model": model, "gap": GAP}
    files = {
        f"{package}_plugin.py": (PLUGIN + more).format(**values),
        f"{package}_config.py": CONFIG.format(code=config, depth=depth),
        f"{package}_part.py": PART,
        f"{package}-1.0.dist-info/METADATA": f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n",
        f"{package}-1.0.dist-info/entry_points.txt": f"[{GROUP}]\n{part or name} = {package}_plugin\n",
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


@cache
def site() -> str:
    """A folder with all of them, for the module path."""
    folder = Path(tempfile.mkdtemp(prefix="planted-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    install(folder, "planted-well", more=MODEL + OTHERS, model=PARITY)
    for _, name, _, changes in BROKEN:
        install(folder, f"planted-{name}", **changes)
    return str(folder)


def catalog() -> Catalog:
    if site() not in sys.path:
        sys.path.append(site())
    importlib.invalidate_caches()
    return Catalog.discover(group=GROUP)
