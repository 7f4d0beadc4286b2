"""The catalog over real dists in a temporary folder: whatever is wrong with one plugin, the others are there."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from textwrap import dedent
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from unirl.core.errors import PluginBroken, PluginConflict, PluginNotFound
from unirl.core.limits import Reason
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.entry_points import entry_points
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.plugins.loading import PluginRecord
from unirl.core.plugins.registry import KnownPart, Registry
from unirl.core.specs.plan import Plan
from unirl.core.specs.spec import EngineSpec, TrackerSpec
from unirl.core.types.event import Event

GROUP = "plantest.v1"
"""Another group than the real one, so that the plugins of the workspace stay out of these tests."""

HEAD = """
    from unirl.core.plugins.hookspec import hookimpl
    from unirl.core.specs.spec import EngineSpec, ModelSpec, RewardSpec, TrackerSpec

    def tracker(name):
        return TrackerSpec(name=name, summary="Notes.", build="planted_impl:build", config="planted_impl:Config")

    def reward(**fields):
        return RewardSpec(**{"name": "x", "summary": "s", "build": "m:b", "config": "m:C", "scale": "s", **fields})
"""
GOOD = """
    @hookimpl
    def unirl_trackers():
        return [tracker("{name}")]
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install(dist, code)` installs a dist with one plugin; its entry point and module carry its name."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(dist: str, code: str = "", *, group: str = GROUP, version: str = "1.0", point: str = "") -> None:
        module = f"planted_{dist.replace('-', '_')}"
        (tmp_path / f"{module}.py").write_text(dedent(HEAD) + dedent(code), encoding="utf-8")
        info = tmp_path / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[{group}]\n{point or f'{dist} = {module}'}\n", encoding="utf-8")

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("planted_"):
            del sys.modules[name]


@pytest.fixture
def installed(install: Install) -> Install:
    """As `install`, with one good plugin already there, which must survive whatever is planted next."""
    install("good", GOOD.format(name="good-notes"))
    return install


def only(catalog: Catalog, name: str) -> PluginRecord:
    """The record of one plugin, after checking that the good one is untouched."""
    assert catalog.get("tracker", "good-notes").dist == "good"
    return next(record for record in catalog.records if record.name == name)


BROKEN = {
    "import-error": ("import a_module_that_is_not_there", "needs 'a_module_that_is_not_there', which is not installed"),
    "raises": ("raise RuntimeError('no licence')", "raised RuntimeError: no licence \\(.*planted_bad.py:[0-9]+"),
    "exits": ("import sys; sys.exit(3)", "raised SystemExit: 3"),
    "syntax": ("def (", "SyntaxError"),
    "hook-raises": (
        "@hookimpl\ndef unirl_models():\n    raise ValueError('no weights')",
        "unirl_models raised ValueError: no weights",
    ),
    "generator-raises": (
        "@hookimpl\ndef unirl_trackers():\n    yield tracker('one')\n    raise ValueError('half way')",
        "unirl_trackers raised ValueError: half way",
    ),
    "wrong-arguments": (
        "@hookimpl\ndef unirl_event(event, colour):\n    pass",
        "a hook does not fit: .*colour",
    ),
    "misspelt": (
        "@hookimpl\ndef unirl_traker():\n    return []",
        "'unirl_traker' is not a hook of unirl.v1; did you mean 'unirl_trackers'?",
    ),
    "not-decorated": ("def unirl_trackers():\n    return []", "'unirl_trackers' is not decorated with @hookimpl"),
    "no-hook": ("x = 1", "it implements no hook of unirl.v1"),
    "not-specs": (
        "@hookimpl\ndef unirl_trackers():\n    return ['notes']",
        "unirl_trackers returned str",
    ),
    "none": ("@hookimpl\ndef unirl_trackers():\n    return None", "returned None, expected a list of specs"),
    "interrupts": ("raise KeyboardInterrupt", "raised KeyboardInterrupt: "),
    "build-without-colon": (
        "@hookimpl\ndef unirl_trackers():\n    return [TrackerSpec(name='x', summary='', build='m', config='m:C')]",
        "tracker 'x': build: got 'm', expected a string 'package.module:attribute'",
    ),
    "config-as-class": (
        "@hookimpl\ndef unirl_trackers():\n    return [TrackerSpec(name='x', summary='', build='m:b', config=int)]",
        "tracker 'x': config: got <class 'int'>, expected a string 'package.module:attribute'",
    ),
    "nonsense-media": (
        "@hookimpl\ndef unirl_rewards():\n    return [reward(media='smell')]",
        "reward 'x': media: got 'smell', expected one of 'image', 'video', 'text', 'audio', 'any'",
    ),
    "string-for-tuple": (
        "@hookimpl\ndef unirl_rewards():\n    return [reward(media='image', parts='red')]",
        "reward 'x': parts: got str 'red', expected a tuple",
    ),
    "mapping-for-set": (
        "@hookimpl\ndef unirl_rewards():\n    return [reward(media='image', capabilities={'reward-group': False})]",
        "reward 'x': capabilities: got dict {'reward-group': False}, expected a set",
    ),
    "number-for-string": (
        "@hookimpl\ndef unirl_rewards():\n    return [reward(media='image', scale=1)]",
        "reward 'x': scale: got int 1, expected a string",
    ),
    "not-a-list": ("@hookimpl\ndef unirl_trackers():\n    return 3", "returned 3, expected a list of specs"),
    "other-spec": (
        "@hookimpl\ndef unirl_engines():\n    return [tracker('x')]",
        "unirl_engines returned TrackerSpec",
    ),
    "bad-name": (
        "@hookimpl\ndef unirl_trackers():\n    return [tracker('My Notes')]",
        "the name 'My Notes' must be lower case with dashes",
    ),
    "twice": (
        "@hookimpl\ndef unirl_trackers():\n    return [tracker('x'), tracker('x')]",
        "it provides tracker 'x' twice",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_recorded_and_does_not_hide_the_others(installed: Install, case: str) -> None:
    code, says = BROKEN[case]
    installed("bad", "\n" + code)
    record = only(Catalog.discover(group=GROUP), "bad")
    assert (record.status, record.dist, record.version) == ("broken", "bad", "1.0")
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(record.error)


def test_where_ctrl_c_is_ignored_an_interrupt_is_the_plugins_own(installed: Install) -> None:
    installed("bad", "\nraise KeyboardInterrupt")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        record = only(Catalog.discover(group=GROUP), "bad")
    finally:
        signal.signal(signal.SIGINT, before)
    assert "raised KeyboardInterrupt" in str(record.error)


def test_an_entry_point_without_its_module_is_told_from_a_missing_dependency(installed: Install) -> None:
    installed("bad", point="bad = planted_nowhere.plugin")
    record = only(Catalog.discover(group=GROUP), "bad")
    assert record.error == (
        "its entry point names 'planted_nowhere.plugin', but there is no module 'planted_nowhere'. Reinstall bad."
    )


def test_an_entry_point_that_names_nothing_is_broken(installed: Install) -> None:
    installed("bad", GOOD.format(name="x"), point="bad = planted_bad:plugin")
    assert "no attribute 'plugin'" in str(only(Catalog.discover(group=GROUP), "bad").error)


@pytest.mark.parametrize("content", [b"[plantest.v1]\nno equals sign\n", b"\xff\xfe not text"])
def test_entry_points_that_cannot_be_read_hide_no_other_dist(
    installed: Install, tmp_path: Path, content: bytes
) -> None:
    installed("bad", GOOD.format(name="x"))
    (tmp_path / "bad-1.0.dist-info" / "entry_points.txt").write_bytes(content)
    record = only(Catalog.discover(group=GROUP), "bad")
    assert record.status == "broken"
    assert "entry points of its dist cannot be read" in str(record.error)


def test_a_dist_whose_metadata_is_gone_does_not_stop_discovery(installed: Install, tmp_path: Path) -> None:
    installed("bad", GOOD.format(name="x"))
    (tmp_path / "bad-1.0.dist-info" / "METADATA").unlink()
    only(Catalog.discover(group=GROUP), "bad")


def test_a_plugin_of_another_version_of_the_hooks_is_refused_without_importing_it(installed: Install) -> None:
    installed("later", "\nraise RuntimeError", group="plantest.v2")
    installed("other-project", "\nraise RuntimeError", group="othertest.v2")
    catalog = Catalog.discover(group=GROUP)
    record = only(catalog, "later")
    assert record.status == "refused"
    assert "it targets hook API plantest.v2; this unirl-core provides plantest.v1" in str(record.error)
    assert "planted_later" not in sys.modules
    assert "other-project" not in {record.name for record in catalog.records}


def test_plugins_come_in_the_order_of_their_names(installed: Install) -> None:
    installed("zebra", GOOD.format(name="z"))
    installed("ant", GOOD.format(name="a"))
    assert [record.name for record in Catalog.discover(group=GROUP).records] == ["ant", "good", "zebra"]


def test_of_two_copies_of_a_dist_the_first_on_the_path_counts(
    installed: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = tmp_path / "second"
    info = second / "Good-0.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Good\nVersion: 0.9\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\ngood = planted_good\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path, str(second)])
    assert [record.version for record in Catalog.discover(group=GROUP).records] == ["1.0"]


def test_a_disabled_plugin_is_not_imported_and_says_so(installed: Install) -> None:
    installed("heavy", "\nraise RuntimeError")
    catalog = Catalog.discover(group=GROUP, disabled=["heavy"])
    assert only(catalog, "heavy").status == "disabled"
    assert "planted_heavy" not in sys.modules
    with pytest.raises(PluginBroken, match="is disabled: it was disabled by the user"):
        catalog.get("tracker", "heavy")


def test_disabling_what_is_not_installed_is_an_error(installed: Install) -> None:
    with pytest.raises(PluginNotFound, match=r"'goodd': cannot be disabled, .*did you mean 'good'"):
        Catalog.discover(group=GROUP, disabled=["goodd"])


def test_a_dist_with_commands_alone_can_be_disabled(installed: Install) -> None:
    installed("gallery", group="unirl.commands")
    assert [record.name for record in Catalog.discover(group=GROUP, disabled=["gallery"]).records] == ["good"]


def test_entry_points_that_cannot_be_read_hide_those_of_no_other_dist(installed: Install, tmp_path: Path) -> None:
    """Those of every dist here, by the library that reads them for everyone else."""
    groups = ("unirl.v1", "unirl.commands", "unirl.recipes", "unirl.assets", "console_scripts", "pytest11")
    expected = {group: {(one.name, one.value) for one in metadata.entry_points(group=group)} for group in groups}
    assert all(expected.values())
    installed("bad", "")
    (tmp_path / "bad-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe not text")
    assert {group: {(one.name, one.value) for one in entry_points(group)} for group in groups} == expected


def test_a_part_of_a_broken_plugin_is_an_error_only_when_asked_for(installed: Install) -> None:
    installed("bad", "\n@hookimpl\ndef unirl_trackers():\n    return [tracker('x'), 3]")
    catalog = Catalog.discover(group=GROUP)
    assert catalog.names("tracker") == ["good-notes"]
    with pytest.raises(PluginBroken, match=r"tracker 'x': plugin 'bad' .* is broken: unirl_trackers returned"):
        catalog.get("tracker", "x")


def test_the_cause_of_a_broken_plugin_is_kept(installed: Install) -> None:
    installed("bad", "\nraise RuntimeError('no licence')")
    with pytest.raises(PluginBroken) as caught:
        Catalog.discover(group=GROUP).get("tracker", "bad")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_registry_tells_which_broken_plugin_would_provide_a_part() -> None:
    record = SimpleNamespace(unirl_rewards=hookimpl(lambda: 3))
    registry = Registry([KnownPart(kind="reward", name="shapes", dist="Unirl_Reward.Rules", summary="s")])
    catalog = Catalog.of({"unirl-reward-rules": record}, registry=registry)
    with pytest.raises(PluginBroken, match=r"reward 'shapes': plugin 'unirl-reward-rules' .* is broken"):
        catalog.get("reward", "shapes")


def trackers(*names: str) -> Any:
    specs = [TrackerSpec(name=name, summary="Notes.", build="m:build", config="m:C") for name in names]
    return SimpleNamespace(unirl_trackers=hookimpl(lambda: specs))


def test_two_providers_of_one_part_conflict_only_when_it_is_asked_for() -> None:
    catalog = Catalog.of({"dist-one": trackers("notes", "a"), "dist-two": trackers("notes", "b")})
    assert catalog.get("tracker", "a").dist == "dist-one"
    assert catalog.names("tracker") == ["a", "b", "notes"]
    assert [record.conflicts for record in catalog.records] == [
        ("tracker 'notes' is also provided by dist-two",),
        ("tracker 'notes' is also provided by dist-one",),
    ]
    with pytest.raises(PluginConflict, match="provided by dist-one 0 and dist-two 0"):
        catalog.get("tracker", "notes")


REGISTRY = Registry(
    [
        KnownPart(kind="tracker", name="board", dist="unirl-tracker-board", summary="s"),
        KnownPart(kind="tracker", name="later", dist="unirl-tracker-later", summary="s", planned=True),
        KnownPart(kind="tracker", name="newer", dist="unirl-tracker-notes", summary="s"),
    ]
)


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("tracker", "ntes", "tracker 'ntes' is unknown; installed: notes; did you mean 'notes'?"),
        ("tracker", "bord", "did you mean 'board'?"),
        (
            "tracker",
            "board",
            r"'board' is not installed; installed: notes. Install it: `pip install unirl-tracker-board`\.",
        ),
        ("tracker", "later", "It is planned as unirl-tracker-later and not published yet."),
        ("tracker", "newer", "unirl-tracker-notes 0 is installed but does not provide it; upgrade it."),
        ("engine", "zzz", "engine 'zzz' is unknown; no engine is installed."),
        ("engine", "notes", "; there is a part of that name, but its kind is tracker."),
    ],
)
def test_a_part_that_is_not_there_says_what_to_do(kind: Any, name: str, says: str) -> None:
    catalog = Catalog.of({"unirl-tracker-notes": trackers("notes")}, registry=REGISTRY)
    with pytest.raises(PluginNotFound, match=says):
        catalog.get(kind, name)


def test_a_missing_engine_names_those_that_may_take_its_place() -> None:
    spec = EngineSpec(name="own", summary="s", build="m:build", config="m:C")
    engine = SimpleNamespace(unirl_engines=hookimpl(lambda: [spec]))
    known = KnownPart(kind="engine", name="usual", dist="unirl-engine-usual", summary="s")
    with pytest.raises(PluginNotFound) as caught:
        Catalog.of({"unirl-engine-own": engine}, registry=Registry([known])).get("engine", "usual")
    assert str(caught.value).endswith("Install it: `pip install unirl-engine-usual`, or choose engine=own.")


def test_a_search_in_vain_names_the_plugins_that_did_not_load(installed: Install) -> None:
    installed("bad", "\nraise RuntimeError")
    with pytest.raises(PluginNotFound, match="Not loaded: bad; `unirl plugins` says why"):
        Catalog.discover(group=GROUP).get("tracker", "zzz")


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("planted_gone:build", "importing it raised ModuleNotFoundError"),
        ("planted_impl:buidl", "it has no attribute 'buidl'; did you mean 'build'"),
        ("planted_impl:build.x", "it has no attribute 'x'"),
        ("planted_raises:build", "importing it raised ZeroDivisionError: division by zero .*planted_raises.py:1"),
    ],
)
def test_a_string_that_does_not_resolve_names_the_plugin_and_itself(
    install: Install, tmp_path: Path, target: str, says: str
) -> None:
    (tmp_path / "planted_impl.py").write_text("def build(config): ...\n", encoding="utf-8")
    (tmp_path / "planted_raises.py").write_text("1 / 0\n", encoding="utf-8")
    spec = TrackerSpec(name="notes", summary="Notes.", build=target, config="planted_impl:Config")
    catalog = Catalog.of({"unirl-notes": SimpleNamespace(unirl_trackers=hookimpl(lambda: [spec]))})
    with pytest.raises(PluginBroken, match=f"plugin 'unirl-notes' .unirl-notes 0. names {target!r}; {says}"):
        catalog.resolve(target)


def test_a_string_that_resolves_is_imported_when_asked(install: Install, tmp_path: Path) -> None:
    (tmp_path / "planted_impl.py").write_text("class A:\n    class B: ...\n", encoding="utf-8")
    assert Catalog.of({}).resolve("planted_impl:A.B").__qualname__ == "A.B"


def raising(*arguments: object, **keywords: object) -> Any:
    raise ValueError("boom")


def test_a_check_that_raises_does_not_silence_the_others() -> None:
    judge = SimpleNamespace(
        unirl_check_plan=hookimpl(lambda plan: [Reason(key="run.max_steps", text="3 was asked for.")])
    )
    bystander = trackers("notes")
    bystander.unirl_check_plan = hookimpl(lambda plan: raising())
    catalog = Catalog.of({"bystander": bystander, "judge": judge})
    plan = cast(Plan, SimpleNamespace(choices=[]))
    # None of the bystander's parts is in the plan, so its failure refuses nothing.
    assert catalog.check_plan(plan) == [Reason(key="run.max_steps", text="3 was asked for.")]
    assert [(failure.plugin, failure.hook) for failure in catalog.failures] == [("bystander", "unirl_check_plan")]


@pytest.mark.parametrize("choices", [[SimpleNamespace(dist="owner")], []])
def test_a_check_that_raises_refuses_the_plans_that_it_is_there_for(choices: list[Any]) -> None:
    plugin = trackers("notes") if choices else SimpleNamespace()
    plugin.unirl_check_plan = hookimpl(lambda plan: raising())
    result = Catalog.of({"owner": plugin}).check_plan(cast(Plan, SimpleNamespace(choices=choices)))
    assert [reason.key for reason in result] == ["plugin owner"]
    assert "its check of the plan raised ValueError: boom" in result[0].text


def test_a_check_that_gives_anything_but_reasons_is_refused_with_what_it_gave() -> None:
    judge = SimpleNamespace(unirl_check_plan=hookimpl(lambda plan: ["run.max_steps: 3 was asked for."]))
    (reason,) = Catalog.of({"judge": judge}).check_plan(cast(Plan, SimpleNamespace(choices=[])))
    assert reason.key == "plugin judge"
    assert "got 'run.max_steps: 3 was asked for.', expected a unirl.core.limits.Reason" in reason.text


def test_an_observer_that_raises_is_recorded_once_and_the_others_see_every_event() -> None:
    seen: list[int] = []
    catalog = Catalog.of(
        {
            "bad": SimpleNamespace(unirl_event=hookimpl(lambda event: raising())),
            "good": SimpleNamespace(unirl_event=hookimpl(lambda event: seen.append(event.step))),
        }
    )
    for step in range(3):
        catalog.emit(Event(kind="step", step=step))
    assert seen == [0, 1, 2]
    assert [(failure.dist, failure.hook) for failure in catalog.failures] == [("bad", "unirl_event")]


def test_a_plugin_may_be_a_module() -> None:
    module = ModuleType("planted_module")
    vars(module)["unirl_trackers"] = trackers("notes").unirl_trackers
    assert Catalog.of({"unirl-x": module}).records[0].module == "planted_module"


def test_discovery_imports_nothing_heavy() -> None:
    """In a separate process: this one has torch."""
    code = """
        import sys
        from unirl.core.plugins.catalog import Catalog
        catalog = Catalog.discover()
        assert len(catalog.parts()) >= 1, catalog.records
        heavy = {"torch", "ray", "hydra", "omegaconf", "transformers", "diffusers", "peft", "numpy"}
        print(sorted(heavy & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
