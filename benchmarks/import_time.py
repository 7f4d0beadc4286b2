"""Start-up time of commands, each in a fresh process: minima of several interleaved runs, in milliseconds.

    python benchmarks/import_time.py
    python benchmarks/import_time.py --against ../other-checkout

`as installed` runs what is there; `with byte code` lets Python keep compiled modules, as it does where `pip` installed
them and PYTHONDONTWRITEBYTECODE is not set. The commands with `+ N dists` see so many more dists: first dists that have
nothing to do with UniRL, then plugins with one part each.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

UNIRL = ["-m", "unirl.core"]
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import unirl.core.roles": ["-c", "import unirl.core.roles"],
    "unirl --help": [*UNIRL, "--help"],
    "unirl plugins --json": [*UNIRL, "plugins", "--json"],
    "unirl compose quickstart": [*UNIRL, "compose", "quickstart"],
}
WITH_DISTS = ("unirl --help", "unirl plugins --json")
PLUGIN = """
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import TrackerSpec


@hookimpl
def unirl_trackers():
    return [TrackerSpec(name="planted-{number}", summary="Notes.", build="planted:build", config="planted:Config")]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, set up by its bootstrap.py")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dists", type=int, default=60)
    options = parser.parse_args()
    pythons = {"here": Path(sys.executable)}
    if options.against:
        pythons["against"] = options.against.absolute() / ".venv" / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _plant(root / "others", options.dists, group="other", code="")
        _plant(root / "plugins", options.dists, group="unirl.v1", code=PLUGIN)
        jobs = {name: (arguments, "") for name, arguments in COMMANDS.items()}
        for kind in ("others", "plugins"):
            for name in WITH_DISTS:
                jobs[f"{name} + {options.dists} {kind}"] = (COMMANDS[name], str(root / kind))
        # An empty working directory: `-m` puts it on the module path.
        (root / "here").mkdir()
        for mode, environment in (
            ("as installed", dict(os.environ)),
            ("with byte code", _caching(root / "cache")),
        ):
            print(
                f"\n{mode:38}"
                + "".join(f"{name:>10} wall, CPU" for name in pythons)
                + "  CPU ratio" * bool(options.against)
            )
            _measure(jobs, pythons, environment, rounds=options.rounds, cwd=root / "here")


def _measure(
    jobs: dict[str, tuple[list[str], str]],
    pythons: dict[str, Path],
    environment: dict[str, str],
    *,
    rounds: int,
    cwd: Path,
) -> None:
    for name, (arguments, path) in jobs.items():
        best = {python: (float("inf"), float("inf")) for python in pythons}
        for _ in range(rounds):
            for python, executable in pythons.items():
                wall, cpu = _run([str(executable), *arguments], {**environment, "PYTHONPATH": path}, cwd)
                best[python] = (min(best[python][0], wall), min(best[python][1], cpu))
        line = f"{name:38}" + "".join(f"{wall * 1000:13.0f}{cpu * 1000:7.0f}" for wall, cpu in best.values())
        if len(best) > 1:
            line += f"{best['here'][1] / best['against'][1]:11.3f}"
        print(line, flush=True)


def _run(command: list[str], environment: dict[str, str], cwd: Path) -> tuple[float, float]:
    """Wall time and CPU time in seconds of a command that must succeed."""
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environment, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = process.stderr.read() if process.stderr else b""
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors.decode()}")
    return wall, usage.ru_utime + usage.ru_stime


def _caching(folder: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(folder)}


def _plant(folder: Path, count: int, *, group: str, code: str) -> None:
    """Dists as an installer leaves them, each with one entry point."""
    for number in range(count):
        info = folder / f"planted_{number}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: planted-{number}\nVersion: 1.0\n", encoding="utf-8"
        )
        (info / "entry_points.txt").write_text(f"[{group}]\nplanted-{number} = planted_{number}\n", encoding="utf-8")
        (folder / f"planted_{number}.py").write_text(code.replace("{number}", str(number)), encoding="utf-8")


if __name__ == "__main__":
    main()
