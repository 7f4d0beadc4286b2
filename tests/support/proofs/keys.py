"""Keys: one hash of everything that can change how a group of tests ends.

A key covers

- every file that the group reaches (`.sources` says how it is found), byte for byte and by its path, so that a file
  that moves changes it too; where the group is marked `keyed`, Python without comments and docstrings;
- the versions of all packages of `uv.lock` that are not of the workspace, and `bootstrap.py`, which installs them. The
  locks of engines are files of their dists;
- pytest's settings in the root `pyproject.toml`;
- the minor version of Python, the machine's architecture and the widest instruction set that numeric libraries use on
  it, for another one rounds otherwise; and the environment variables by which they are told what to use.

A keyed group that is about one part leaves out the folders of core that compose a recipe and drive a run (`DRIVER`):
parts are reached through their roles, and whether the driver calls them rightly is tested, at every change of it, by
the groups that are about runs, and with parts in this process by all tests that are not marked.
Groups about wheels, third-party plugins and generic models on engines (`ABOUT_OTHERS`) leave out the loop: they run it only
to call what they are about.
A keyed group that is about where parts are placed (`ABOUT_PLACES`) leaves out the plugins of rewards for the same reason: a
reward is one object with one method, wherever it is, and its own tests and claims are about what it returns.

Not covered are the C library and other packages of the system, and load: a test that depends on these is no proof
either way. The tenth of the proven groups that runs nevertheless is there to find what nobody thought of.

`pytest.mark.reads(...)` names dists and files that a test depends on and does not name otherwise.
`pytest.mark.composes` is for tests that compose recipes and match plans, and build no part: of plugins their key has what
describes parts and their settings, and of the loop what tells whether a run can begin (`BEGINS`).
`pytest.mark.keyed` is for tests of behaviour, which prose does not change. `pytest.mark.whole_tree` is for those about
the repository as a whole, such as its documents and wheels: they have no key, and always run.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from .sources import Node, Workspace

__all__ = [
    "COMPOSES",
    "DRIVER",
    "KEYED",
    "MUTANTS",
    "WHOLE_TREE",
    "counts",
    "group_of",
    "groups",
    "instruction_set",
    "is_marked",
    "key",
    "key_of_group",
    "reached_by",
    "reached_by_subject",
    "surroundings",
]

MUTANTS = "packages/unirl-conformance/tests/test_mutants.py"
"""Its tests share one report of each kind of part, and nothing between the kinds."""
KEYED = "pytest.mark.keyed"
COMPOSES = "pytest.mark.composes"
WHOLE_TREE = "pytest.mark.whole_tree"
DRIVER = ("cli", "loop", "match", "observe", "recipe")
BEGINS = ("prompts", "readiness", "run_data")
"""Modules of the loop that `unirl compose` calls, too."""
ABOUT_PLACES = ("packages/unirl-runtime/", "plugins/transports/")
ABOUT_OTHERS = ("tests/test_generic_engines.py", "tests/test_installed_wheels.py", "tests/test_third_party.py")
ABOUT_RUNS = (
    "tests/",
    "packages/unirl-core/",
    "packages/unirl-conformance/tests/test_new_",
    "packages/unirl-reward-service/",
    "plugins/trackers/",
    *ABOUT_PLACES,
)
KINDS_ABOUT_RUNS = ("cell", "launcher", "tracker", "transport")
VARIABLES = re.compile(r"(OMP|MKL|ATEN|ONEDNN)_\w+|CUDA_VISIBLE_DEVICES")
"""Not those of OpenBLAS: NumPy multiplies no matrices here whose bits a test compares."""


def group_of(nodeid: str) -> str:
    """What one worker has to run together: the file of a test, of mutants those of their kind."""
    file, _, name = nodeid.partition("::")
    kind = name.partition("[")[2].rstrip("]").partition("-")[0]
    return f"{file}[{kind}]" if file == MUTANTS and kind else file


def groups(workspace: Workspace) -> list[str]:
    """Of all test modules but those about the whole tree; of the mutants each kind."""
    result: list[str] = []
    for folder in ("tests", "packages", "plugins"):
        for path in sorted((workspace.root / folder).rglob("test_*.py")):
            file = path.relative_to(workspace.root).as_posix()
            # What pytest does not collect: `norecursedirs`, and helpers that are called like tests.
            if {"src", "third_party"} & set(path.parts) or file.startswith("tests/support/"):
                continue
            if file == MUTANTS:
                result += [f"{file}[{kind}]" for kind in _kinds(workspace)]
            elif WHOLE_TREE not in path.read_text(encoding="utf-8"):
                result.append(file)
    return result


def is_marked(group: str, root: Path, mark: str = KEYED) -> bool:
    """Whether a group is of behaviour alone, or has another mark."""
    return mark in (root / group.partition("[")[0]).read_text(encoding="utf-8")


def reached_by(group: str, workspace: Workspace) -> set[Path]:
    """The files that decide how a group of tests ends."""
    file, _, kind = group.rstrip("]").partition("[")
    others = tuple(other for other in _kinds(workspace) if other != kind) if kind else ()
    composes = is_marked(group, workspace.root, COMPOSES)

    def follows(path: Path) -> bool:
        return not _is_of(path, others) and not (composes and _is_built(path, workspace))

    composed = [path for dist in workspace.dists for path in workspace.of_plugin(dist)] + [*workspace.recipes]
    files = workspace.reached([workspace.root / file, *(composed if composes else ())], follows=follows)
    return {path for path in files if counts(path, group, workspace.root)}


def counts(path: Path, group: str, root: Path) -> bool:
    """Whether a file that a group reaches decides how it ends."""
    if _is_of_loop(path) and (group in ABOUT_OTHERS or (is_marked(group, root, COMPOSES) and path.stem not in BEGINS)):
        return False
    if not is_marked(group, root):
        return True
    if group.startswith(ABOUT_PLACES) and path.is_relative_to(root / "plugins" / "rewards"):
        return False
    return is_about_runs(group) or not drives(path)


def is_about_runs(group: str) -> bool:
    """Whether the driver of a run decides, too, how a group ends."""
    file, _, kind = group.rstrip("]").partition("[")
    return kind in KINDS_ABOUT_RUNS or (not kind and file.startswith(ABOUT_RUNS))


def drives(path: Path) -> bool:
    """Whether a file is of `DRIVER`."""
    return path.parent.name in DRIVER and path.parent.parent.name == "core"


def _is_of_loop(path: Path) -> bool:
    return path.parent.name == "loop" and path.parent.parent.name == "core"


def reached_by_subject(kind: str, parts: Iterable[Node], workspace: Workspace, *, tries_driver: bool) -> set[Path]:
    """The files that decide how all claims about a subject of conformance end.

    parts: as `Workspace.of_part` gives them. Claims about it are in `suite/test_<kind>*.py`.
    tries_driver: whether a change of the driver alone tries it again.
    """
    suite = workspace.modules["unirl.conformance.suite"].parent
    others = tuple(other for other in _kinds(workspace) if other != kind)
    run = [workspace.modules[f"unirl.conformance.{name}"] for name in ("command", "run", "pytest_plugin")]
    roots = [*run, *suite.glob(f"test_{kind}*.py"), *parts]
    files = workspace.reached(roots, follows=lambda path: not _is_of(path, others))
    return files if tries_driver else {path for path in files if not drives(path)}


def key_of_group(group: str, workspace: Workspace) -> str:
    """The key of a group of tests, as the sources are now."""
    return key(reached_by(group, workspace), workspace, with_prose=not is_marked(group, workspace.root))


def key(files: Iterable[Path], workspace: Workspace, *, with_prose: bool = False) -> str:
    """32 hex digits over these files and what surrounds them."""
    whole = hashlib.sha256(surroundings(workspace.root).encode())
    for path in sorted(files):
        digest = workspace.digest(path, with_prose=with_prose)
        whole.update(f"{path.relative_to(workspace.root).as_posix()} {digest}\n".encode())
    return whole.hexdigest()[:32]


@functools.cache
def surroundings(root: Path) -> str:
    """What a result depends on besides the sources of the workspace."""
    lock = tomllib.loads((root / "uv.lock").read_text(encoding="utf-8"))["package"]
    outside = sorted(f"{p['name']} {p['version']}" for p in lock if not {"editable", "virtual"} & p["source"].keys())
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]
    told = sorted(f"{name}={value}" for name, value in os.environ.items() if VARIABLES.fullmatch(name))
    bootstrap = hashlib.sha256((root / "bootstrap.py").read_bytes()).hexdigest()
    return "\n".join([*outside, repr(settings), bootstrap, *told, instruction_set(), ""])


def instruction_set() -> str:
    """Python, architecture and the widest vectors: `3.11 x86_64 avx512f amx_tile`, with `cuda` where there is a GPU."""
    flags: set[str] = set()
    if (cpu := Path("/proc/cpuinfo")).is_file():
        flags = set(re.findall(r"^(?:flags|Features)\s*:(.*)$", cpu.read_text(), re.MULTILINE)[:1][0].split())
    wide = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_tile", "sve") if name in flags]
    gpu = ["cuda"] if Path("/dev/nvidiactl").exists() else []
    return " ".join(["{}.{}".format(*sys.version_info[:2]), platform.machine(), *wide, *gpu])


def _is_built(path: Path, workspace: Workspace) -> bool:
    """Whether a module of a plugin is what its spec names to make a part: neither the plugin nor its settings."""
    if not path.is_relative_to(workspace.root / "plugins") or workspace.dist_of(path) is None:
        return False
    return path.name not in ("plugin.py", "config.py") and path not in workspace.settings


def _kinds(workspace: Workspace) -> list[str]:
    """Of subjects: each has a module of mutants."""
    folder = (workspace.root / MUTANTS).parent / "conformance_mutants"
    suite = workspace.modules["unirl.conformance.suite"].parent
    names = {path.stem for path in folder.glob("*.py")}
    return sorted(name for name in names if any(suite.glob(f"test_{name}*.py")) and "_" not in name)


def _is_of(path: Path, kinds: tuple[str, ...]) -> bool:
    """Whether a file holds claims about other kinds of subjects, mutants of them or what they are tried with: pytest
    collects them, and runs none."""
    name = path.stem.removeprefix("test_")
    return path.parent.name in ("suite", "conformance_mutants", "fixtures") and (
        name in kinds or name.startswith(tuple(f"{kind}_" for kind in kinds)) or name in {f"latent_{k}" for k in kinds}
    )
