#!/usr/bin/env python3
"""Set up this checkout with nothing but Python 3.11 to 3.13 and pip, then run a command in it.

    python3 bootstrap.py -- unirl train quickstart
    python3 bootstrap.py --dev -- pytest

Gets uv (into `.uv-bin` if there is none), creates `.venv`, and installs the locked versions of `uv.lock` and every dist
of the workspace. On a machine with an NVIDIA GPU this is `uv sync` with the locked CUDA build of torch. Otherwise it
installs the CPU build of the same torch version, which saves about 4 GB. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent
VENV = ROOT / ".venv"
UV_VERSION = "0.13.8"
PYTHONS = ((3, 11), (3, 14))
"""First supported and first unsupported Python version."""
CUDA_LINKED = ("torch", "torchvision", "torchaudio", "torchcodec", "timm")
"""Packages whose wheels on the index need the CUDA build of torch; with the CPU build they fail at import."""


def main() -> None:
    arguments, command = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--accel",
        choices=("auto", "cpu", "cuda"),
        default=os.environ.get("UNIRL_ACCEL", "auto"),
        help="which torch to install; auto looks for an NVIDIA GPU",
    )
    parser.add_argument("--dev", action="store_true", help="also install what tests and checks need")
    options = parser.parse_args(arguments)
    if not PYTHONS[0] <= sys.version_info[:2] < PYTHONS[1]:
        result = ".".join(map(str, sys.version_info[:3]))
        _fail(f"got Python {result}, expected 3.11, 3.12 or 3.13. Try `python3.11 bootstrap.py ...`.")
    if not (ROOT / "uv.lock").is_file():
        _fail(f"{ROOT / 'uv.lock'} is missing: run this script inside a checkout of UniRL.")

    accel = options.accel
    if accel == "auto":
        accel = "cuda" if _has_gpu() else "cpu"
    _say(f"Python {sys.version.split()[0]}, torch for {accel}")
    # UV_PYTHON would make `uv pip` write into that interpreter instead of .venv.
    environment = {key: value for key, value in os.environ.items() if key != "UV_PYTHON"}
    environment["UV_PYTHON_DOWNLOADS"] = "never"
    uv = _uv()
    groups = ["--all-packages", *(["--group", "dev"] if options.dev else ["--no-default-groups"])]
    if accel == "cuda":
        _run(uv, "sync", "--quiet", "--frozen", "--python", sys.executable, *groups, env=environment)
    else:
        _install_for_cpu(uv, groups, environment)
    if command:
        _say(" ".join(command))
        _exec(command, uv, environment)
    _say(f"ready: source {VENV.name}/bin/activate")


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or pathlib.Path("/dev/nvidiactl").exists()


def _uv() -> str:
    """Path of uv: $UV, the one on PATH, or our own."""
    own = ROOT / ".uv-bin" / "bin" / "uv"
    for candidate in (os.environ.get("UV"), shutil.which("uv"), str(own)):
        if candidate and pathlib.Path(candidate).is_file():
            return candidate
    # --target works where the system's Python is externally managed, without a virtual environment and without root.
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _run(*pip, "--target", ROOT / ".uv-bin", f"uv=={UV_VERSION}")
    return str(own)


def _install_for_cpu(uv: str, groups: list[str], environment: dict[str, str]) -> None:
    """The locked versions, with torch and what is linked against it cut out, and the CPU build of torch instead."""
    python = VENV / "bin" / "python"
    if not python.exists():
        _run(uv, "venv", "--quiet", "--python", sys.executable, VENV, env=environment)
    requirements, constraints = VENV / "cpu-requirements.txt", VENV / "cpu-constraints.txt"
    export = (uv, "export", "--quiet", "--frozen", "--no-hashes", *groups)
    _run(*export, "--output-file", requirements, env=environment)
    requirements.write_text(_pruned(requirements.read_text(encoding="utf-8"), CUDA_LINKED), encoding="utf-8")
    _run(*export, "--no-emit-workspace", "--output-file", constraints, env=environment)
    locked = constraints.read_text(encoding="utf-8")
    torch = re.search(r"^torch==([^\s;+]+)", locked, flags=re.MULTILINE)
    if torch is None:
        _fail("uv.lock has no version of torch; run `uv lock`.")
    # torch's own small dependencies come with it, at the locked versions; torch itself must stay open for "+cpu".
    constraints.write_text(re.sub(r"^torch==.*\n", "", locked, flags=re.MULTILINE), encoding="utf-8")
    install = (uv, "pip", "install", "--quiet", "--python", python)
    _run(*install, "--no-deps", "--requirement", requirements, env=environment)
    version = torch.group(1)
    # Wheels that this machine keeps, then torch's CPU index, then the index's own build, which is larger but works.
    tries = [["--find-links", place, f"torch=={version}+cpu"] for place in _find_links()]
    tries += [["--torch-backend", "cpu", f"torch=={version}"], [f"torch=={version}"]]
    for number, attempt in enumerate(tries, start=1):
        is_last = number == len(tries)
        if _run(*install, "--constraint", constraints, *attempt, env=environment, check=is_last, quiet=not is_last):
            return


def _pruned(exported: str, names: tuple[str, ...]) -> str:
    """An export of uv without these packages and what only they require: it lists below each one what requires it."""
    blocks = re.findall(r"^[^\s#].*\n(?:[ ]+#.*\n)*", exported, flags=re.MULTILINE)
    gone = set(names)
    while True:
        kept = []
        for block in blocks:
            line, _, above = block.partition("\n")
            name = re.split(r"[=<>~;\[ ]", line)[0]
            via = set(re.findall(r"#\s+(?:via )?([\w.-]+)", above)) - {"via"}
            if name in gone or (via and via <= gone):
                gone.add(name)
            else:
                kept.append(block)
        if len(kept) == len(blocks):
            return "".join(kept)
        blocks = kept


def _find_links() -> list[str]:
    """Where pip is told to look for wheels: a machine that keeps a CPU build there is honoured; uv does not look."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    places = os.environ.get("PIP_FIND_LINKS", "").split()
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        if key.endswith("find-links"):
            places += value.strip("'\" ").split()
    return list(dict.fromkeys(places))


def _run(*command: object, env: dict[str, str] | None = None, check: bool = True, quiet: bool = False) -> bool:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, env=env, check=False, stderr=subprocess.DEVNULL if quiet else None)
    if check and done.returncode:
        _fail(f"`{' '.join(words)}` failed with exit code {done.returncode}.")
    return done.returncode == 0


def _exec(command: list[str], uv: str, environment: dict[str, str]) -> None:
    # Our own uv comes last: what makes environments of engines, and wheels, finds it there.
    places = (VENV / "bin", environment["PATH"], pathlib.Path(uv).parent)
    environment["PATH"] = os.pathsep.join(map(str, places))
    environment["VIRTUAL_ENV"] = str(VENV)
    # On a CPU host a later plain `uv run` would put the CUDA build back, and Ray's uv hook would pack up the checkout.
    environment["UV_NO_SYNC"] = "1"
    environment["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    program = shutil.which(command[0], path=environment["PATH"])
    if program is None:
        _fail(f"{command[0]!r} is not in {VENV / 'bin'} nor on PATH; tests and checks need `--dev`.")
    sys.stdout.flush()
    os.chdir(ROOT)
    os.execve(program, command, environment)


def _say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


def _fail(text: str) -> None:
    raise SystemExit(f"[setup] {text}")


if __name__ == "__main__":
    main()
