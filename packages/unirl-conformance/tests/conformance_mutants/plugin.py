"""Dists that are broken in one way each, next to some that are well."""

from __future__ import annotations

import atexit
import importlib
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

from unirl.conformance.claims import claim_kinds
from unirl.conformance.suite.test_plugin_dist import SIZE_BYTES
from unirl.core.plugins.catalog import Catalog

from conformance_mutants.mutant import Mutant
from conformance_mutants.plugin_dists import CONFIG, GROUP, Dist

GAP = min(name for name, kind in claim_kinds().items() if kind == "engine")
"""A claim that no plugin is tried on, for gaps that are well."""

MODEL = """
@hookimpl
def unirl_models():
    tiny = Miniature(write="{package}.part:write")
    native = {{Cap.LATENT_STAGE}}
    return [ModelSpec(**{{
        **PLAIN, "name": "{part}", "tracks": {{"image": "latent"}}, "trainable": "net", "capabilities": native,
        "path_key": "width", "tiny": tiny, "reference": "a.Pipeline", "parity": "{package}.part:parity", {changed}
    }})]
"""
ALGORITHM = """
@hookimpl
def unirl_algorithms():
    return [AlgorithmSpec(**{{**PLAIN, "name": "{part}", "needs": Needs(), "paper": {paper!r}}})]
"""
BACKEND = """
@hookimpl
def unirl_backends():
    stated = set()
    {change}
    return [BackendSpec(**{{**PLAIN, "config": "{package}.config:Backend", "name": "{part}", "capabilities": stated}})]
"""
BACKEND_CONFIG = """
from unirl.core.specs.config import BackendConfig, RewardConfig


@dataclass
class Backend(BackendConfig):
    pass


@dataclass
class Reward(RewardConfig):
    pass
"""
REWARD = """
@hookimpl
def unirl_rewards():
    native = {{Cap.REWARD_SAMPLE}}
    return [RewardSpec(**{{
        **PLAIN, "config": "{package}.config:Reward", "name": "{part}", "capabilities": native, "media": "image",
        "scale": "share of pixels that are right", "range": (0.0, 1.0), {changed}
    }})]
"""
ENGINE = """
@hookimpl
def unirl_engines():
    gap = Gap(claim="{gap}", reason="It is planted and samples nothing at all.")
    stated = {{{stated}}}
    return [EngineSpec(**{{**PLAIN, "name": "{part}", "capabilities": stated, "gaps": (gap,)}})]
"""
MORE_CONFIG = CONFIG + BACKEND_CONFIG


def code(template: str, dist: str, **changes: str) -> str:
    return template.format(package=dist.replace("-", "_"), part=dist, gap=GAP, **changes)


def everything(dist: str) -> str:
    """A part of each kind, all of them well."""
    return (
        code(MODEL, dist, changed="")
        + code(ALGORITHM, dist, paper="arXiv 2505.05470")
        + code(BACKEND, dist, change="")
        + code(REWARD, dist, changed="")
        + code(ENGINE, dist, stated="Cap.LATENT_ROLLOUT")
    )


WELL = (
    Dist(name="planted-well", code=everything("planted-well"), config=MORE_CONFIG),
    Dist(name="planted-editable", layout="src"),
    # Tests beside the package are in the folder that is on the module path, and in no wheel.
    Dist(name="planted-flat", layout="flat", files={"tests/test_it.py": b"", "docs/index.md": b""}),
    Dist(name="planted-two-packages", files={"planted_two_packages_kernels/__init__.py": b""}),
    Dist(name="planted-unbounded", config=MORE_CONFIG,
         code=code(REWARD, "planted-unbounded", changed='"range": (-float("inf"), float("inf")), "scale": "a size, unbounded in kB"')),
    Dist(name="planted-without-paper", code=code(ALGORITHM, "planted-without-paper", paper="It is made up for this test alone.")),
)  # fmt: skip

BROKEN: tuple[tuple[Mutant, Dist], ...] = (
    (
        Mutant(claim="the-plugin-loads", name="planted-raises", breaks="raises when it is imported"),
        Dist(name="planted-raises", code="raise RuntimeError('no licence')\n"),
    ),
    *(
        (
            Mutant(claim="no-other-dist-provides-its-parts", name=name, breaks="provides what another dist provides"),
            Dist(name=name, part="planted-twin"),
        )
        for name in ("planted-twin-one", "planted-twin-two")
    ),
    (
        Mutant(claim="its-names-are-unique", name="planted-thief", breaks="calls its tracker `swanlab`"),
        Dist(name="planted-thief", part="swanlab"),
    ),
    (
        Mutant(claim="importing-it-is-light", name="planted-heavy", breaks="imports OmegaConf in its plugin.py"),
        Dist(name="planted-heavy", code="import omegaconf\n"),
    ),
    (
        Mutant(
            claim="importing-it-is-light", name="planted-heavy-config", breaks="imports OmegaConf with its settings"
        ),
        Dist(name="planted-heavy-config", config=f"import omegaconf\n{CONFIG}"),
    ),
    (
        Mutant(claim="importing-it-has-no-side-effects", name="planted-setter", breaks="sets an environment variable"),
        Dist(name="planted-setter", code="import os\nos.environ.setdefault('PLANTED_FLAG', '1')\n"),
    ),
    (
        Mutant(claim="every-part-has-a-summary", name="planted-silent", breaks="has one word as its summary"),
        Dist(name="planted-silent", tracker='"summary": "Notes"'),
    ),
    (
        Mutant(claim="names-are-lower-case-with-dashes", name="planted-loud", breaks="calls its plugin `Planted_Loud`"),
        Dist(name="planted-loud", point="Planted_Loud"),
    ),
    (
        Mutant(
            claim="every-string-of-its-specs-resolves", name="planted-boaster", breaks="states `sleep` of a backend"
        ),
        Dist(
            name="planted-boaster",
            config=MORE_CONFIG,
            code=code(BACKEND, "planted-boaster", change="stated = {Cap.SLEEP}"),
        ),
    ),
    (
        Mutant(
            claim="a-model-brings-its-miniature-and-its-reference",
            name="planted-untried",
            breaks="has no function that runs its reference",
        ),
        Dist(name="planted-untried", code=code(MODEL, "planted-untried", changed='"parity": ""')),
    ),
    (
        Mutant(
            claim="an-algorithm-names-its-source", name="planted-sourceless", breaks="says `see below` as its paper"
        ),
        Dist(name="planted-sourceless", code=code(ALGORITHM, "planted-sourceless", paper="see below")),
    ),
    (
        Mutant(
            claim="a-reward-states-its-scale-and-range", name="planted-boundless", breaks="leaves its range unstated"
        ),
        Dist(
            name="planted-boundless",
            config=MORE_CONFIG,
            code=code(REWARD, "planted-boundless", changed='"range": (-float("inf"), float("inf"))'),
        ),
    ),
    (
        Mutant(
            claim="every-string-names-a-module-that-exists",
            name="planted-lost",
            breaks="names a module that was renamed",
            # Whoever resolves the string stands before the same missing module.
            also=("every-string-of-its-specs-resolves",),
        ),
        Dist(name="planted-lost", tracker='"build": "planted_lost.gone:build"'),
    ),
    (
        Mutant(
            claim="every-string-of-its-specs-resolves",
            name="planted-misfit",
            breaks="its `build` wants one argument more",
        ),
        Dist(name="planted-misfit", tracker='"build": "planted_misfit.part:needs_more"'),
    ),
    (
        Mutant(
            claim="every-setting-is-documented", name="planted-terse", breaks="has no text for a setting inside another"
        ),
        Dist(name="planted-terse", config=CONFIG.replace('    """How deep it goes."""\n', "")),
    ),
    (
        Mutant(
            claim="gaps-name-claims-and-give-reasons", name="planted-typo", breaks="declares a gap by a misspelt name"
        ),
        Dist(
            name="planted-typo",
            tracker='"gaps": (Gap(claim="there-is-no-such-claim", reason="It is planted and does nothing."),)',
        ),
    ),
    (
        Mutant(
            claim="gaps-name-claims-and-give-reasons",
            name="planted-curt",
            breaks="declares a gap with two words as reason",
        ),
        Dist(name="planted-curt", tracker=f'"gaps": (Gap(claim="{GAP}", reason="known issue"),)'),
    ),
    (
        Mutant(claim="its-version-can-be-compared", name="planted-latest", breaks="has the version `latest`"),
        Dist(name="planted-latest", headers={"Version": "latest"}),
    ),
    (
        Mutant(
            claim="it-states-the-python-that-it-needs", name="planted-any-python", breaks="says nothing of its Python"
        ),
        Dist(name="planted-any-python", headers={"Requires-Python": ""}),
    ),
    (
        Mutant(
            claim="it-states-the-python-that-it-needs", name="planted-old-python", breaks="is for Python 3.8 at most"
        ),
        Dist(name="planted-old-python", headers={"Requires-Python": "<3.9"}),
    ),
    (
        Mutant(claim="it-requires-the-core", name="planted-alone", breaks="does not require unirl-core"),
        Dist(name="planted-alone", requires=("packaging",)),
    ),
    (
        Mutant(
            claim="every-requirement-is-met-here",
            name="planted-unmet",
            breaks="requires a release that is not installed",
        ),
        Dist(name="planted-unmet", requires=("unirl-core", "packaging>=9999", "gone; python_version < '3'")),
    ),
    (
        Mutant(claim="its-readme-names-what-it-provides", name="planted-brief", breaks="has a README of one line"),
        Dist(name="planted-brief", readme="# {name}\n\nThe tracker `{part}`.\n"),
    ),
    (
        Mutant(
            claim="its-readme-names-what-it-provides", name="planted-windy", breaks="has a README that names no part"
        ),
        Dist(name="planted-windy", part="planted-unnamed", readme="It is a part like many others. " * 30),
    ),
    (
        Mutant(claim="it-has-a-one-line-summary", name="planted-unknown", breaks="has no summary"),
        Dist(name="planted-unknown", headers={"Summary": "UNKNOWN"}),
    ),
    (
        Mutant(
            claim="it-carries-its-licence", name="planted-textless", breaks="comes without the licence that it states"
        ),
        Dist(name="planted-textless", headers={"License-File": ""}),
    ),
    (
        Mutant(claim="its-package-is-typed", name="planted-untyped", breaks="has no py.typed"),
        Dist(name="planted-untyped", without=("planted_untyped/py.typed",)),
    ),
    (
        # Editable, and with its sources off the module path of this process, where it would hide all other dists.
        Mutant(
            claim="shared-namespaces-stay-open", name="planted-closer", breaks="brings `unirl/trackers/__init__.py`"
        ),
        Dist(name="planted-closer", layout="src", apart={"unirl/trackers/__init__.py": b""}),
    ),
    (
        Mutant(claim="nothing-is-installed-outside-its-package", name="planted-sprawl", breaks="installs `examples`"),
        Dist(name="planted-sprawl", files={"examples/planted_run.py": b""}),
    ),
    (
        Mutant(
            claim="nothing-is-installed-outside-its-package", name="planted-intruder", breaks="installs into the core"
        ),
        Dist(name="planted-intruder", files={"unirl/core/planted_extra.py": b""}),
    ),
    (
        Mutant(claim="no-tests-are-installed", name="planted-tested", breaks="installs its tests"),
        Dist(name="planted-tested", files={"planted_tested/tests/test_it.py": b""}),
    ),
    (
        Mutant(claim="nothing-large-is-installed", name="planted-fat", breaks="brings 5 MB of weights"),
        Dist(name="planted-fat", files={"planted_fat/weights.bin": bytes(SIZE_BYTES)}),
    ),
)
MUTANTS = [mutant for mutant, _ in BROKEN]


@cache
def module_path() -> list[str]:
    """Installs all of them, once, and gives what must be on the module path."""
    folder = Path(tempfile.mkdtemp(prefix="planted-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    result: dict[str, None] = {}
    for dist in (*WELL, *(dist for _, dist in BROKEN)):
        result |= {str(path): None for path in dist.write(folder)}
    return list(result)


def catalog() -> Catalog:
    sys.path += [path for path in module_path() if path not in sys.path]
    importlib.invalidate_caches()
    return Catalog.discover(group=GROUP)
