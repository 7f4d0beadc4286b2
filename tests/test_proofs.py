"""Keys of groups of tests: what changes them, what does not, and what a run makes of a record."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from proofs import conformance, keys, record
from proofs.pytest_plugin import STANDS
from proofs.record import Proof
from proofs.sources import Workspace
from unirl.conformance.source_hash import source_digest
from unirl.conformance.subjects import subjects
from unirl.core.plugins.catalog import Catalog

pytestmark = pytest.mark.whole_tree

ROOT = Path(__file__).parents[1]
VLLM = "plugins/engines/vllm/tests/test_vllm_engine.py"
OMNI = "plugins/engines/vllm-omni/tests/test_vllm_omni_engine.py"
KLEIN = "plugins/models/flux2-klein/tests/test_flux2_klein_engines.py"
RESUMED = "tests/test_resumed_algorithms.py"
LAUNCHERS = "packages/unirl-runtime/tests/test_launchers.py"
FAMILIES = "packages/unirl-runtime/tests/test_launcher_families.py"
ENGINES = f"{keys.MUTANTS}[engine]"
EDITS = "packages/unirl-quickstart/tests/test_edit_checkpoint.py"
AWM = "plugins/algorithms/awm/tests/test_awm.py"
COMMAND = "packages/unirl-core/tests/test_cli.py"
THIRD_PARTY = "tests/test_third_party.py"
RECIPES = "tests/test_recipes.py"
DRIVER = "packages/unirl-core/src/unirl/core/loop/run.py"


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what keys are made from."""
    root = tmp_path_factory.mktemp("copy") / "unirl"
    leave = shutil.ignore_patterns("__pycache__", ".venv", ".git", ".*_cache", "*.egg-info", ".uv-bin")
    for name in ("packages", "plugins", "tests", "registry", "recipes"):
        shutil.copytree(ROOT / name, root / name, ignore=leave, symlinks=True)
    for name in ("pyproject.toml", "uv.lock", "bootstrap.py", "conftest.py"):
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture(scope="module")
def workspace(copied: Path) -> Workspace:
    return Workspace(copied)


@pytest.fixture
def edit(workspace: Workspace) -> Callable[..., bool]:
    """`edit(path, old, new, group)`: whether this change of a file, which is taken back, changes the group's key."""

    def forget(file: Path) -> None:
        workspace.forget(file)
        keys.surroundings.cache_clear()

    def changes(path: str, old: str, new: str, group: str) -> bool:
        file = workspace.root / path
        before, text = key_of(group, workspace), file.read_bytes()
        assert old.encode() in text, f"{path} does not hold {old!r}"
        try:
            file.write_bytes(text.replace(old.encode(), new.encode(), 1))
            forget(file)
            return key_of(group, workspace) != before
        finally:
            file.write_bytes(text)
            forget(file)

    return changes


def key_of(group: str, workspace: Workspace) -> str:
    return keys.key_of_group(group, workspace)


HERE = Workspace(ROOT)


def names(group: str) -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in keys.reached_by(group, HERE)}


FUTURE = "from __future__ import annotations\n"


@pytest.mark.parametrize(
    ("group", "path"),
    [
        # Imported, over several modules; in a conftest; by a helper of all tests.
        (VLLM, "packages/unirl-core/src/unirl/core/types/track.py"),
        (VLLM, "plugins/engines/vllm/tests/conftest.py"),
        (VLLM, "tests/support/external_engines/texts.py"),
        # Named: the server runs in a process of its own, and the model is built from its spec.
        (VLLM, "plugins/engines/vllm/src/unirl/engines/vllm/server.py"),
        # In a folder of a package, which is installed in the environment of an engine.
        (OMNI, "packages/unirl-engine-cpu/src/unirl/engine_cpu/vllm-omni-platform/src/unirl_vllm_omni_cpu/__init__.py"),
        # Named by a recipe that the test names, and by a script that it starts.
        (LAUNCHERS, "plugins/models/sd3/src/unirl/models/sd3/model.py"),
        (LAUNCHERS, "plugins/algorithms/flow-grpo/src/unirl/algorithms/flow_grpo/algorithm.py"),
        (FAMILIES, "plugins/algorithms/ppo/src/unirl/algorithms/ppo/algorithm.py"),
        (LAUNCHERS, "tests/support/fork_server.py"),
        (LAUNCHERS, "packages/unirl-runtime/src/unirl/runtime/ray_worker.py"),
        (LAUNCHERS, "packages/unirl-core/src/unirl/core/loop/loop.py"),
        # By a default, and by a command.
        (RESUMED, "packages/unirl-runtime/src/unirl/runtime/local_launcher.py"),
        ("tests/test_export.py", "packages/unirl-runtime/src/unirl/runtime/export/command.py"),
        # Named by a value of a setting, `+reward@reward.size=length`.
        (RESUMED, "plugins/rewards/text/src/unirl/rewards/text/plugin.py"),
        # Collected by pytest from the name of their package; named by a pattern.
        (ENGINES, "packages/unirl-conformance/src/unirl/conformance/suite/test_engine_noise.py"),
        (ENGINES, "packages/unirl-conformance/tests/conformance_mutants/engine_apart_broken.py"),
        (ENGINES, "packages/unirl-conformance/src/unirl/conformance/fixtures/text_engine.py"),
        # What recipes set.
        (RECIPES, "plugins/algorithms/flow-grpo/src/unirl/algorithms/flow_grpo/config.py"),
        (RECIPES, "plugins/rewards/rules/src/unirl/rewards/rules/function.py"),
    ],
)
def test_code_that_a_test_depends_on_changes_its_key_and_a_comment_there_does_not(
    edit: Callable[..., bool], group: str, path: str
) -> None:
    assert edit(path, FUTURE, f"{FUTURE}\nCHANGED = 1\n", group)
    assert not edit(path, FUTURE, f"{FUTURE}\n# A comment.\n\n\n", group)


def test_prose_changes_the_key_of_a_test_that_is_not_marked(edit: Callable[..., bool]) -> None:
    assert edit("packages/unirl-core/src/unirl/core/types/track.py", FUTURE, f"{FUTURE}\n# A comment.\n", COMMAND)


def test_a_dist_that_a_test_names_is_in_its_key_with_what_is_installed_with_it_and_others_are_not(
    edit: Callable[..., bool],
) -> None:
    rules, ppo, awm = "plugins/rewards/rules", "plugins/algorithms/ppo", "plugins/algorithms/awm"
    assert edit(f"{rules}/README.md", "#", "##", THIRD_PARTY)
    assert edit(f"{rules}/src/unirl/rewards/rules/plugin.py", FUTURE, f"{FUTURE}\n# A comment.\n", THIRD_PARTY)
    assert not edit(f"{ppo}/src/unirl/algorithms/ppo/algorithm.py", FUTURE, f"{FUTURE}\nCHANGED = 1\n", THIRD_PARTY)
    # It comes along, for a recipe that is not run.
    assert edit(f"{awm}/src/unirl/algorithms/awm/plugin.py", FUTURE, f"{FUTURE}\nCHANGED = 1\n", THIRD_PARTY)
    assert not edit(f"{awm}/src/unirl/algorithms/awm/algorithm.py", FUTURE, f"{FUTURE}\nCHANGED = 1\n", THIRD_PARTY)


def test_what_stands_for_the_mutants_of_a_kind_is_of_their_group() -> None:
    assert keys.group_of(f"{keys.MUTANTS}::{STANDS}[engine]") == ENGINES


def test_every_module_of_tests_is_a_group_but_those_about_the_whole_tree() -> None:
    groups = set(keys.groups(HERE))
    assert {COMMAND, VLLM, ENGINES} <= groups
    assert not {"tests/test_docs.py", "tests/test_wheels.py", keys.MUTANTS} & groups


@pytest.mark.parametrize(
    ("group", "path", "old", "new"),
    [
        (LAUNCHERS, "packages/unirl-quickstart/src/unirl/quickstart/recipes/quickstart.yaml", "max_steps", "max_stepz"),
        (VLLM, "plugins/engines/vllm/pyproject.toml", "0.1.0", "0.1.1"),
        (VLLM, "uv.lock", 'name = "torch"\nversion = "2', 'name = "torch"\nversion = "3'),
        (VLLM, "pyproject.toml", "timeout = 300", "timeout = 301"),
        (VLLM, "bootstrap.py", "import", "import  "),
    ],
)
def test_recipes_locks_and_settings_change_a_key_byte_for_byte(
    edit: Callable[..., bool], group: str, path: str, old: str, new: str
) -> None:
    assert edit(path, old, new, group)


@pytest.mark.parametrize(
    ("group", "path"),
    [
        # How a run is driven is tried by groups that are about runs.
        (VLLM, "packages/unirl-core/src/unirl/core/cli/train.py"),
        (ENGINES, "packages/unirl-core/src/unirl/core/loop/loop.py"),
        (VLLM, "plugins/engines/sglang/src/unirl/engines/sglang/engine.py"),
        # A reward is called alike wherever it is placed.
        (LAUNCHERS, "plugins/rewards/rules/src/unirl/rewards/rules/brightness.py"),
        (ENGINES, "packages/unirl-conformance/tests/conformance_mutants/reward.py"),
        (ENGINES, "plugins/rewards/math/src/unirl/rewards/math/plain.py"),
        (LAUNCHERS, "plugins/engines/vllm/src/unirl/engines/vllm/engine.py"),
        (LAUNCHERS, "plugins/algorithms/ppo/src/unirl/algorithms/ppo/algorithm.py"),
        # Packages say "format" and "diffusers" of files and of a library, and a list of modules names no engine.
        (LAUNCHERS, "plugins/rewards/text/src/unirl/rewards/text/plugin.py"),
        (LAUNCHERS, "plugins/models/diffusers/src/unirl/models/diffusers/plugin.py"),
        (KLEIN, "plugins/engines/vllm/src/unirl/engines/vllm/plugin.py"),
        # Another launcher of the same plugin, whose settings have a choice called like an engine.
        (RESUMED, "packages/unirl-runtime/src/unirl/runtime/ray_launcher.py"),
        (VLLM, "plugins/engines/trainside/src/unirl/engines/trainside/plugin.py"),
        # A package of files that is called like a recipe, and a part that a recipe replaces.
        (EDITS, "plugins/models/sd3/src/unirl/models/sd3/model.py"),
        (AWM, "plugins/algorithms/flow-grpo/src/unirl/algorithms/flow_grpo/algorithm.py"),
        # Nothing is built from a recipe that is only composed.
        (RECIPES, "plugins/algorithms/flow-grpo/src/unirl/algorithms/flow_grpo/algorithm.py"),
        (RECIPES, "packages/unirl-core/src/unirl/core/loop/loop.py"),
        (THIRD_PARTY, "packages/unirl-core/src/unirl/core/loop/loop.py"),
    ],
)
def test_what_a_test_has_nothing_to_do_with_is_not_in_its_key(group: str, path: str) -> None:
    assert (ROOT / path).is_file()
    assert path not in names(group)


def test_a_module_that_is_named_by_a_string_with_a_name_is_in_a_key() -> None:
    """`build=f"{_HERE}.dual_encoders:build_pickscore"`."""
    keyed = conformance.Keyed(subjects(Catalog.discover()))
    files = {path.relative_to(ROOT).as_posix() for path in keyed.reached("conformance reward:pickscore")}
    assert "plugins/rewards/clip-family/src/unirl/rewards/clip_family/dual_encoders.py" in files


def test_a_part_leads_to_every_module_that_its_spec_names() -> None:
    """Specs are read from the sources for keys; here they are the objects."""
    dists = {dist.name: dist for dist in HERE.dists}
    for found in Catalog.discover().parts():
        if found.dist in dists:
            modules = {HERE.modules[name] for name in re.findall(r"'(unirl(?:\.\w+)+):\w+'", repr(found.spec))}
            assert modules, found.spec
            assert modules <= HERE.reached(HERE.of_part(found.spec.name, dists[found.dist])), found.spec.name


def test_a_command_that_composes_loads_these_modules_of_the_loop_and_no_others() -> None:
    """Keys of tests that compose leave out the others, so that no file which they open would show one that is missing."""
    prefix = "unirl.core.loop."
    code = (
        "import contextlib, io, sys\n"
        "from unirl.core.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    main(['compose', 'quickstart'])\n"
        f"print(*[name for name in sys.modules if name.startswith({prefix!r})])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name.removeprefix(prefix) for name in done.stdout.split()} == set(keys.BEGINS)


def test_what_tools_leave_behind_is_in_no_key(tmp_path: Path) -> None:
    """Their caches are other ones in every checkout."""
    ships = tmp_path / "packages/a/src/a"
    for name in ("__init__.py", "table.txt", ".ruff_cache/1", "__pycache__/a.pyc", "input_cache.txt"):
        (ships / name).parent.mkdir(parents=True, exist_ok=True)
        (ships / name).touch()
    (tmp_path / "packages/a/pyproject.toml").write_text("[project]\nname = 'a'\n")
    (dist,) = Workspace(tmp_path).dists
    assert [path.name for path in dist.data] == ["pyproject.toml", "input_cache.txt", "table.txt"]


def test_locks_of_an_engine_and_weights_of_a_checkpoint_are_in_a_key() -> None:
    ships = {path.relative_to(ROOT).as_posix() for path in (ROOT / "plugins/engines/vllm/src").rglob("*.txt")}
    assert ships and ships <= names(VLLM)
    assert any(name.endswith(".safetensors") for name in names(LAUNCHERS))


def test_the_digest_of_a_source_is_blind_to_prose_and_to_nothing_else() -> None:
    plain = "class A:\n    x: int = 1\n\n    def f(self):\n        return 'text'\n"
    prose = (
        '"""Module."""\n# Comment.\nclass A:\n    """Class."""\n\n    x: int = 1  # one\n    """Field."""\n\n'
        '    def f(self):\n        """Function."""\n        return ( "text" )\n'
    )
    assert source_digest(prose) == source_digest(plain)
    for old, new in (("1", "2"), ("'text'", "'other'"), ("x: int", "y: int"), ("return", "yield")):
        assert source_digest(plain.replace(old, new)) != source_digest(plain)


def test_a_tenth_of_what_is_proven_runs_and_another_one_with_each_commit() -> None:
    """A tenth of the seconds, not of the names."""
    seconds = {"long": 30.0, "other": 10.0} | {f"tests/test_{number}.py": number % 7 for number in range(400)}
    tenths = {record.tenth(seconds, str(number)) for number in range(200)}
    # Of ten, one is missed by all of 200 draws with probability 10 x 0.9^200, once in 1e8.
    assert len(tenths) == 10
    assert sorted(name for names_ in tenths for name in names_) == sorted(seconds)
    for names_ in tenths:
        # The next longest group goes to the part with the least time, so parts differ by no more than the longest group but
        # for the first two: 6 s.
        assert sum(seconds[name] for name in names_) == pytest.approx(sum(seconds.values()) / 10, abs=6)


def test_subjects_that_wait_for_one_start_of_an_engine_are_of_the_same_tenth() -> None:
    # At the tier that tries every algorithm with every engine.
    found = subjects(Catalog.discover(), tier="full")
    hosted = [subject for subject in found if subject.programs and not subject.refused]
    starts = {conformance.tried_together(subject) for subject in hosted}
    assert {"sd3+vllm-omni", "qwen3+vllm"} <= starts and len(starts) < len(hosted) / 5
    alone = [subject for subject in found if not subject.programs]
    assert len({conformance.tried_together(subject) for subject in alone}) == len(alone)


def test_what_a_test_reaches_does_not_depend_on_the_order_in_which_it_is_found(workspace: Workspace) -> None:
    """Of one that goes through a catalog, which leads to all plugins."""
    test = workspace.root / "tests" / "test_generic_engines.py"
    once = workspace.reached([test])
    assert workspace.reached([test, test]) == once
    assert {module for dist in workspace.dists for module in workspace.of_plugin(dist)} <= once


def test_a_change_of_the_driver_tries_a_cell_of_every_part_again_and_few_more() -> None:
    found = conformance.Keyed(subjects(Catalog.discover()))
    cells = {name: subject for name, subject in found.subjects.items() if subject.kind == "cell"}
    again = found.tried_with_driver & cells.keys()

    def parts(names: Iterable[str]) -> set[tuple[str, str]]:
        return {(part.spec.kind, part.spec.name) for name in names for part in cells[name].parts}

    assert parts(again) == parts(name for name, subject in cells.items() if not subject.programs)
    assert len(again) <= len(parts(again)) < len(cells) / 4
    for name in (min(again), min(cells.keys() - again), "conformance launcher:local"):
        assert (ROOT / DRIVER in found.reached(name)) == (name in found.tried_with_driver)


def test_the_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    proofs = {("a.py", "3.11 x86_64"): proof(), ("a.py", "3.11 arm64"): proof(machine="3.11 arm64")}
    assert record.read(tmp_path) == {}
    record.write(tmp_path, proofs)
    assert record.read(tmp_path) == proofs


def proof(*, key: str = "0" * 32, machine: str = "3.11 x86_64") -> Proof:
    return Proof(key=key, commit="c" * 40, machine=machine, cpu="a CPU", num_tests=3, seconds=9.5)


LONG = f"""
import os

import pytest
from helper import SECONDS

pytestmark = {keys.KEYED}

assert "UNIMPORTABLE" not in os.environ

def test_one():
    assert SECONDS < 9

def test_two():
    pass
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of git with one keyed file of two tests and one that is about the whole tree."""
    (tmp_path / "tests" / "support").mkdir(parents=True)
    for folder in ("packages", "plugins", "registry"):
        (tmp_path / folder).mkdir()
    shutil.copytree(ROOT / "tests/support/proofs", tmp_path / "tests/support/proofs")
    # The claims, of which there are none here.
    (tmp_path / "packages/unirl-conformance/src/unirl/conformance/suite").mkdir(parents=True)
    files = {
        "packages/unirl-conformance/pyproject.toml": "[project]\nname = 'unirl-conformance'\n",
        "packages/unirl-conformance/src/unirl/conformance/suite/__init__.py": "",
        "registry/plugins.toml": "",
        "bootstrap.py": "",
        "uv.lock": "package = []\n",
        ".gitignore": "__pycache__\n.pytest_cache\n",
        "conftest.py": "pytest_plugins = ['proofs.pytest_plugin']\n",
        "pyproject.toml": "[tool.pytest.ini_options]\ntestpaths = ['tests']\npythonpath = ['tests/support', 'tests']\nmarkers = ['keyed', 'whole_tree']\n",
        "tests/helper.py": "SECONDS = 1\n",
        "tests/test_long.py": LONG,
        # First, so that the keyed one is the last that runs before the proofs are written.
        "tests/test_a_tree.py": f"import pytest\n\npytestmark = {keys.WHOLE_TREE}\n\ndef test_three():\n    pass\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(root: Path, *words: str) -> str:
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(["git", *author, *words], cwd=root, check=True, capture_output=True, text=True).stdout


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", "change")


def is_of_the_tenth(root: Path) -> bool:
    return bool(record.tenth({"tests/test_long.py": 1.0}, git(root, "rev-parse", "HEAD").strip()))


def outcome_of(root: Path, *words: str, **environment: str) -> tuple[int, str]:
    """Exit code and output of pytest there, without plugins that happen to be installed here."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist", *words]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    done = subprocess.run(command, cwd=root, env=alone, capture_output=True, text=True, check=False, timeout=250)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "loadfile")], ids=["alone", "parallel"])
def test_what_passed_is_left_out_as_proven_until_its_sources_change(project: Path, workers: tuple[str, ...]) -> None:
    code, output = outcome_of(project, "--prove", *workers)
    assert code == 0 and "3 passed" in output, output
    proven = record.read(project)[("tests/test_long.py", keys.instruction_set())]
    assert proven.commit == git(project, "rev-parse", "HEAD").strip()
    assert proven.num_tests == 2
    commit(project)
    while is_of_the_tenth(project):
        commit(project)

    # Its module is not imported, and its tests are counted all the same.
    code, output = outcome_of(project, "--proven", *workers, UNIMPORTABLE="1")
    assert code == 0, output
    assert re.search(r"1 passed,.* 2 proven in", output), output
    assert f"proven at {proven.commit[:12]}: tests/test_long.py (2 tests" in output
    # Of part of a file its tests are counted one by one.
    code, output = outcome_of(project, "--proven", "-k", "one or three", *workers)
    assert code == 0 and re.search(r"1 passed,.* 1 proven in", output), output
    # Without the option everything runs.
    assert "3 passed" in outcome_of(project, *workers)[1]

    # Of another size, which is what byte code is told from when it is of the same second.
    (project / "tests/helper.py").write_text("SECONDS = 10\n")
    code, output = outcome_of(project, "--proven", *workers)
    assert code == 1 and "1 failed, 2 passed" in output and "proven" not in output.splitlines()[-1], output


def test_a_record_is_renewed_by_what_it_does_not_prove(project: Path) -> None:
    # Durations are in whole seconds.
    (project / "tests/test_long.py").write_text(LONG.replace("    pass", "    __import__('time').sleep(0.6)"))
    commit(project)
    outcome_of(project, "--prove")
    (proven,) = record.read(project).values()
    commit(project)
    while not is_of_the_tenth(project):
        commit(project)

    code, output = outcome_of(project, "--prove", "--proven")
    assert code == 0 and re.search(r"1 passed,.* 2 proven in", output), output
    assert list(record.read(project).values()) == [proven]
    # What does not run takes no time, which is not how long it takes.
    assert "tests/test_long.py" in (project / "tests/durations.json").read_text()

    (project / "tests/helper.py").write_text("SECONDS = 2\n")
    commit(project)
    assert "3 passed" in outcome_of(project, "--prove", "--proven")[1]
    (renewed,) = record.read(project).values()
    assert renewed.key != proven.key and renewed.commit == git(project, "rev-parse", "HEAD").strip()


def test_what_failed_or_was_not_run_proves_nothing(project: Path) -> None:
    outcome_of(project, "--prove")
    assert record.read(project)
    for body in ("assert False", "pytest.skip('not run: no environment')"):
        (project / "tests/test_long.py").write_text(LONG.replace("    pass", f"    {body}"))
        commit(project)
        assert "not proven: tests/test_long.py: tests/test_long.py::test_two" in outcome_of(project, "--prove")[1]
        assert record.read(project) == {}


def test_what_never_runs_on_this_machine_does_not_spoil_a_proof(project: Path) -> None:
    (project / "tests/test_long.py").write_text(
        LONG.replace("    pass", "    pytest.skip('not run: needs a CUDA device')")
    )
    commit(project)
    outcome_of(project, "--prove")
    assert [group for group, _ in record.read(project)] == ["tests/test_long.py"]


def test_a_proof_of_another_cpu_proves_nothing(project: Path) -> None:
    outcome_of(project, "--prove")
    others = {place: dataclasses.replace(found, cpu="another CPU") for place, found in record.read(project).items()}
    record.write(project, others)
    commit(project)
    assert others and "3 passed" in outcome_of(project, "--proven")[1]


def test_a_file_that_a_test_opens_and_its_key_lacks_spoils_the_proof(project: Path) -> None:
    (project / "tests/deep").mkdir()
    (project / "tests/deep/hidden.txt").write_text("1")
    hidden = "open(__file__.replace('test_long.py', '') + 'de' + 'ep/hid' + 'den.txt').close()"
    (project / "tests/test_long.py").write_text(LONG.replace("    pass", f"    {hidden}"))
    commit(project)
    output = outcome_of(project, "--prove")[1]
    assert "its key lacks 1 files that it opened: tests/deep/hidden.txt" in output
    assert record.read(project) == {}


def test_a_proof_of_part_of_a_file_or_of_what_is_not_committed_is_refused(project: Path) -> None:
    code, output = outcome_of(project, "--prove", "-k", "one")
    assert code == 4 and "a proof is of whole files" in output
    (project / "tests/helper.py").write_text("SECONDS = 2\n")
    code, output = outcome_of(project, "--prove")
    assert code == 4 and "commit ['tests/helper.py'] first" in output
