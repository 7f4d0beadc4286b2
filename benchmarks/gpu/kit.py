"""Run parts of the kit, each within its limit, and leave a folder of evidence.

    python benchmarks/gpu/kit.py [first | second | PART ...] [--out FOLDER] [--work FOLDER] [--theirs FOLDER] [--dry]

`run.sh` calls it with what it needs on the path. `--dry` takes tiny sizes and runs anywhere; parts that need a GPU are
then *not run*. A second call with the same `--out` adds its parts. Exits with 1 if a part failed.

Parts that are not timed run side by side first, as many as there are pairs of cores; timed ones follow, one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import RLock
from typing import IO, Any, Literal

import torch
from parts import FIRST, PROMPTS, SECOND, Part, parts
from report import write_report

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "conformance/evidence"
VERSIONS = ("torch", "transformers", "diffusers", "peft", "accelerate", "numpy", "trl", "ray", "unirl-core")
KEPT = ("profile.txt", "conformance/conformance.json")
"""Files of the work folder that are evidence, besides the numbers."""
State = Literal["done", "failed", "timed out", "not run"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["first"], metavar="PART")
    parser.add_argument("--out", type=Path, help="default: conformance/evidence/DEVICE-DATE of the checkout")
    parser.add_argument("--work", type=Path, default=Path("/tmp/unirl-kit"))
    parser.add_argument("--theirs", type=Path, default=Path(__file__).parent, help="folder with flow_grpo's two files")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, without a GPU")
    options = parser.parse_args()
    has_cuda = torch.cuda.is_available()
    if not has_cuda and not options.dry:
        parser.error("no CUDA device is here; `--dry` tries the kit without one.")
    work = options.work / ("dry" if options.dry else "full")
    known = parts(work, theirs=options.theirs.resolve(), is_dry=options.dry, has_cuda=has_cuda)
    groups = {"first": FIRST, "second": SECOND}
    names = [name for word in options.parts for name in groups.get(word, (word,))]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"PART: got {unknown[0]!r}, expected first, second, or some of {', '.join(known)}.")
    machine = describe_machine(is_dry=options.dry)
    out: Path = options.out or EVIDENCE / f"{machine['device'].lower().replace(' ', '-')}-{machine['date']}"
    kit = Kit(out, work, machine=machine)
    kit.run_all(known[name] for name in dict.fromkeys(names))
    kit.close()
    print((out / "README.md").read_text())
    sys.exit(kit.has_failures)


def describe_machine(*, is_dry: bool) -> dict[str, Any]:
    """Device, driver, versions and date. Neither the host nor its paths are named."""
    has_cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if has_cuda else "cpu",
        "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1) if has_cuda else None,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: found for name in VERSIONS if (found := _version(name))},
        "commit": _first_line("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        "date": datetime.now(UTC).date().isoformat(),
        "dry": is_dry,
    }


class Kit:
    """Runs parts and keeps `results.json`, `log.txt` and `README.md` of the evidence folder up to date."""

    def __init__(self, out: Path, work: Path, *, machine: Mapping[str, Any]) -> None:
        self._out, self._work, self._machine = out, work, machine
        self._files = RLock()
        """Held while the folder is written to: parts may run side by side."""
        for folder in (out, work / "measures", work / "runs"):
            folder.mkdir(parents=True, exist_ok=True)
        (work / "prompts.txt").write_text(PROMPTS)
        for name in KEPT:
            # Of an earlier call, which has copied it.
            (work / name).unlink(missing_ok=True)
        file = out / "results.json"
        self._results: dict[str, dict[str, Any]] = json.loads(file.read_text())["parts"] if file.is_file() else {}
        self.has_failures = False

    def run_all(self, parts: Iterable[Part]) -> None:
        """Those that are not timed side by side, then those of them that need another, then timed ones in order."""
        chosen = list(parts)
        aside = [part for part in chosen if not part.is_timed]
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
            for wave in (lambda part: not part.needs, lambda part: part.needs):
                # A list, so that an exception is raised here.
                list(pool.map(self.run, filter(wave, aside)))
        for part in chosen:
            if part.is_timed:
                self.run(part)

    def run(self, part: Part) -> None:
        missing = [name for name in part.needs if self._results.get(name, {}).get("state") != "done"]
        reason = part.absent or (f"it needs {missing[0]}, which is not done" if missing else "")
        began = time.perf_counter()
        self._say(f"{part.name}: {f'not run, {reason}' if reason else f'at most {part.limit_s:g} s'}")
        state: State = "not run" if reason else self._started(part)
        seconds = time.perf_counter() - began
        entry: dict[str, Any] = {"state": state, "seconds": round(seconds, 1), "limit_s": part.limit_s}
        file = self._work / "measures" / f"{part.name}.json"
        if state == "done" and part.is_measured:
            entry |= json.loads(file.read_text())
        if state == "done" and part.samples_memory and (most := self._card_peak_mib(part)):
            entry["measures"]["card_peak_gib"] = most / 1024
        with self._files:
            self._results[part.name] = entry | ({"reason": reason} if reason else {})
            self.has_failures |= state in ("failed", "timed out")
            self._say(f"{part.name}: {state} after {seconds:.1f} s")
            self._write()

    def close(self) -> None:
        for name in KEPT:
            if (file := self._work / name).is_file():
                shutil.copy(file, self._out / file.name)
        self._write()

    def _started(self, part: Part) -> State:
        """Run its command. Its output goes to the log, in which the paths of this machine are replaced."""
        (self._work / "measures" / f"{part.name}.json").unlink(missing_ok=True)
        # What is left of an earlier try would be refused as a run that is there already.
        if part.name != "quickstart-resume":
            shutil.rmtree(self._work / "runs" / part.name, ignore_errors=True)
        output = self._work / f"{part.name}.txt"
        with output.open("w") as file, self._memory_sampled(part):
            state = _run_within(part, file)
        places = {str(self._work): "WORK", str(ROOT): "CHECKOUT", str(Path.home()): "HOME", sys.prefix: "PYTHON"}
        text = output.read_text(errors="replace")
        for path, name in places.items():
            text = text.replace(path, name) if len(path) > 1 else text
        with self._files, (self._out / "log.txt").open("a") as log:
            log.write(f"\n== {part.name}\n{text}\n")
        return state

    @contextmanager
    def _memory_sampled(self, part: Part) -> Iterator[None]:
        """Sample what each process holds on the card, and the card in all, five times a second."""
        if not part.samples_memory or shutil.which("nvidia-smi") is None:
            yield
            return
        samplers: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
        for name, query in QUERIES.items():
            path = self._work / f"{name}.csv"
            with path.open("wb") as file:
                words = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "200"]
                samplers.append((name, path, subprocess.Popen(words, stdout=file, stderr=subprocess.DEVNULL)))
        try:
            yield
        finally:
            for name, path, sampler in samplers:
                sampler.terminate()
                sampler.wait()
                with (self._out / "memory.csv").open("a") as file:
                    file.writelines(f"{part.name}, {name}, {line}\n" for line in path.read_text().splitlines())

    def _card_peak_mib(self, part: Part) -> float:
        """The most that was in use on the card while the part ran; 0 where nothing was sampled."""
        file = self._out / "memory.csv"
        lines = file.read_text().splitlines() if file.is_file() else []
        mine = [line.split(", ") for line in lines if line.startswith(f"{part.name}, card, ")]
        return max((float(words[-1]) for words in mine), default=0.0)

    def _say(self, text: str) -> None:
        line = f"[{datetime.now(UTC):%H:%M:%S}] {text}"
        with self._files, (self._out / "log.txt").open("a") as log:
            print(line, flush=True)
            log.write(f"{line}\n")

    def _write(self) -> None:
        data = {"machine": self._machine, "parts": self._results}
        (self._out / "results.json").write_text(json.dumps(data, indent=1) + "\n")
        write_report(self._out)


QUERIES = {"card": "--query-gpu=timestamp,memory.used", "process": "--query-compute-apps=timestamp,pid,used_memory"}
"""Memory in MiB. In containers the driver may hide processes; the card is always there."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


def _run_within(part: Part, output: IO[str]) -> State:
    """Run a command in a new process group, which is stopped at the limit with everything that it started."""
    process = subprocess.Popen(
        part.command, cwd=ROOT, env={**os.environ, **OFFLINE}, stdout=output, stderr=output, start_new_session=True
    )
    state: State = "timed out"
    try:
        state = "failed" if process.wait(part.limit_s) else "done"
    except subprocess.TimeoutExpired:
        # As Ctrl-C does it: conformance then writes what it has.
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return state


def _first_line(*words: str) -> str | None:
    try:
        lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    return lines[0].strip() if lines else None


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
