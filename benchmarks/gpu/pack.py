"""Pack what a machine without network lacks, in the versions of `uv.lock`: run where there is a network.

    python benchmarks/gpu/pack.py FOLDER [--python 3.12] [--ray]

Expects torch, transformers, accelerate, safetensors, tokenizers, sentencepiece, protobuf, click, rich, pluggy, pyyaml,
packaging, pillow, pandas, pyarrow, hypothesis and pytest with its plugins timeout and xdist over there. Writes
`site.txz` (about 6 MB), with `--ray` also `ray.txz` (about 25 MB): Ray without its jars, its dashboard's pages and its
libraries for data, serving and tuning.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["RAY", "SITE", "locked"]

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 30_000_000
SITE = (
    # Of the dists themselves.
    "diffusers",
    "hydra-core",
    "omegaconf",
    "antlr4-python3-runtime",
    "msgspec",
    "peft",
    "math-verify",
    "latex2sympy2-extended",
    # Of conformance.
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    # Of the comparison with TRL.
    "trl",
    "datasets",
    "dill",
    "multiprocess",
    "xxhash",
)
RAY = ("ray", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py")
UNUSED = (
    "jars",
    "rllib",
    "data",
    "serve",
    "tune",
    "train",
    "llm",
    "dashboard/client",
    "cpp",
    "tests",
    "core/generated/java",
)
"""Folders of Ray that tasks and actors do not need."""
BINARIES = ("*.so", "core/src/ray/*/*", "core/libjemalloc*")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of Python over there")
    parser.add_argument("--platform", default="x86_64-manylinux_2_28")
    parser.add_argument("--ray", action="store_true", help="pack Ray as well, in a second archive")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, dists in (("site", SITE), *((("ray", RAY),) if options.ray else ())):
        with tempfile.TemporaryDirectory() as folder:
            site = Path(folder)
            install(locked(dists), site, python=options.python, platform=options.platform)
            if name == "ray":
                slim_down(site / "ray")
            pack(site, options.folder / f"{name}.txz")


def locked(dists: Iterable[str]) -> list[str]:
    """Requirements of these dists in the versions of `uv.lock`. Raises KeyError for one that it has not."""
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    versions = {package["name"]: package.get("version") for package in packages}
    return [f"{name}=={versions[name]}" for name in dists]


def install(requirements: Sequence[str], site: Path, *, python: str, platform: str) -> None:
    """Unpack their wheels for another Python. The one without a wheel is pure Python and built here."""
    uv = next((str(path) for path in [ROOT / ".uv-bin/bin/uv"] if path.is_file()), "uv")
    target = ["--target", str(site), "--python-version", python, "--python-platform", platform]
    wheels = ["--only-binary", ":all:", "--no-binary", "antlr4-python3-runtime"]
    subprocess.run([uv, "pip", "install", "--quiet", "--no-deps", *target, *wheels, *requirements], check=True)


def slim_down(ray: Path) -> None:
    for name in UNUSED:
        shutil.rmtree(ray / name, ignore_errors=True)
    strip = shutil.which("strip")
    if strip is None:
        raise SystemExit("strip: not found; install binutils, which removes the debug symbols of Ray's programs.")
    for pattern in BINARIES:
        for file in ray.rglob(pattern):
            if file.is_file():
                # Not all that match are programs.
                subprocess.run([strip, "--strip-unneeded", str(file)], check=False, stderr=subprocess.DEVNULL)


def pack(site: Path, archive: Path) -> None:
    """Raises SystemExit for an archive that is larger than the kit promises."""
    kept = [path for path in site.rglob("*") if path.is_file() and path.suffix not in (".pyi", ".pyc")]
    partial = archive.with_suffix(".partial")
    with tarfile.open(partial, "w:xz", preset=9) as tar:
        for path in sorted(kept):
            if path.name != ".lock":
                tar.add(path, arcname=path.relative_to(site))
    partial.rename(archive)
    size = archive.stat().st_size
    print(f"{archive}: {size / 1e6:.1f} MB")
    if size > MOST_BYTES:
        raise SystemExit(f"{archive}: got {size / 1e6:.1f} MB, expected at most {MOST_BYTES / 1e6:.0f} MB.")


if __name__ == "__main__":
    main()
