"""The Prometheus tracker, read by Prometheus' own parser from its own server."""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from unirl.core.errors import RecipeError
from unirl.core.observe.events import EventStream
from unirl.core.observe.tracking import Trackers
from unirl.core.roles import RunInfo
from unirl.trackers.prometheus import plugin
from unirl.trackers.prometheus.config import PrometheusConfig
from unirl.trackers.prometheus.tracker import PrometheusTracker, build

Labels = tuple[tuple[str, str], ...]


def run_info(folder: Path, resumed_at: int | None = None) -> RunInfo:
    return RunInfo(name="r", folder=folder, plan_hash="0123", config={}, resumed_at=resumed_at)


def scraped(folder: Path) -> dict[tuple[str, Labels], float]:
    """Every series, by name and labels."""
    url = (folder / "prometheus.txt").read_text().strip()
    with urlopen(url, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.fixture
def tracker(tmp_path: Path) -> Iterator[PrometheusTracker]:
    own = build(PrometheusConfig(port=0))
    own.start(run_info(tmp_path))
    yield own
    own.finish("done")


def test_the_spec_names_a_build_and_a_config_that_exist() -> None:
    (spec,) = plugin.unirl_trackers()
    assert spec.build == f"{build.__module__}:{build.__qualname__}"
    assert spec.config == f"{PrometheusConfig.__module__}:{PrometheusConfig.__qualname__}"


def test_a_scraper_reads_the_newest_numbers(tmp_path: Path) -> None:
    """As a run hands them on."""
    events = EventStream()
    trackers = Trackers({"prometheus": build(PrometheusConfig(port=0))}, events)
    trackers.start(run_info(tmp_path))
    for step in (1, 2):
        metrics = {"reward_mean": step / 4, "reward/shapes/colour": float("nan")}
        events.emit("step", step=step, metrics=metrics, phases={"train": 2.0 * step, "generate": 1.0}, samples=16)
    events.emit("evaluated", step=2, metrics={"score_mean": 0.75}, samples=4, phases={"evaluate": 3.0})
    events.emit("checkpoint_saved", step=2, folder="step-2", size_bytes=1, seconds=0.5)
    event = events.emit("finding", step=2, text="look")
    series = scraped(tmp_path)
    trackers.finish("done", step=2)
    assert series["unirl_metric", (("key", "reward_mean"),)] == 0.5
    assert math.isnan(series["unirl_metric", (("key", "reward/shapes/colour"),)])
    assert series["unirl_metric", (("key", "eval/score_mean"),)] == 0.75
    assert series["unirl_phase_seconds", (("phase", "train"),)] == 4.0
    assert series["unirl_step", ()] == 2 and series["unirl_samples_total", ()] == 32
    assert series["unirl_findings_total", ()] == 1 and series["unirl_checkpoint_seconds", ()] == 0.5
    # The exposition has 17 digits, so a time of 1e9 s is exact.
    assert series["unirl_last_event_timestamp_seconds", ()] == event.time
    assert series["unirl_state", (("unirl_state", "running"),)] == 1
    assert series["unirl_run_info", (("folder", str(tmp_path)), ("name", "r"), ("plan", "0123"))] == 1


def test_the_server_ends_with_the_run_and_a_resumed_one_goes_on_counting_steps(tmp_path: Path) -> None:
    first = build(PrometheusConfig(port=0))
    first.start(run_info(tmp_path))
    url = (tmp_path / "prometheus.txt").read_text().strip()
    first.finish("stopped")
    first.finish("stopped")
    with pytest.raises(URLError):
        urlopen(url, timeout=10)
    assert not (tmp_path / "prometheus.txt").exists()
    second = build(PrometheusConfig(port=0))
    second.start(run_info(tmp_path, resumed_at=5))
    try:
        assert scraped(tmp_path)["unirl_step", ()] == 5
    finally:
        second.finish("done")


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RecipeError, match=rf"tracker\.prometheus\.port: cannot listen on 127\.0\.0\.1:{port}: "):
            build(PrometheusConfig(port=port)).start(run_info(tmp_path))


def test_a_port_out_of_range_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"tracker\.prometheus\.port: got 70000"):
        build(PrometheusConfig(port=70000))


def test_the_dashboard_asks_for_series_that_there_are(tracker: PrometheusTracker, tmp_path: Path) -> None:
    tracker.log({"reward_mean": 1.0}, step=1)
    events = EventStream()
    events.listen(tracker.event)
    events.emit("step", step=1, metrics={}, phases={"train": 1.0}, samples=1)
    names = {name for name, _ in scraped(tmp_path)}
    text = files("unirl.trackers.prometheus").joinpath("grafana.json").read_text()
    asked = [target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]]
    assert asked
    for expression in asked:
        used = re.findall(r"\b(unirl_[a-z_]+)\{", expression)
        assert used and set(used) <= names, expression
