"""Reward services as real processes, and samples to send them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from resource import RLIMIT_NOFILE, setrlimit
from typing import Any

import httpx
import torch
from unirl.core.roles import ScoreInput
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.reward_service.wire import FORMAT, ScoreReply, ScoreRequest, decode, encode, from_samples

FUNCTION = '''
import hashlib, os, time

def number(images, prompts):
    """The number that each prompt is, or the mean of its image.

    Each call leaves a line when it begins, and one for each image when it ends. It waits while there is a file `hold`.
    """
    path = os.environ["SCORED"]
    with open(path, "a") as log:
        log.write("".join(f"{prompt}|" for prompt in prompts) + "\\n")
    while os.path.exists(path + ".hold"):
        open(path + ".held", "w").close()
        time.sleep(0.01)
    if "die" in prompts:
        os._exit(7)
    time.sleep(60 if "hang" in prompts else 0.03)
    if "no number" in prompts:
        raise ValueError("not a number, nor half a \\ud83d")
    pairs = list(zip(images, prompts))
    values = [float(p) if p[0].isdigit() else sum(i.resize((1, 1)).getpixel((0, 0))) for i, p in pairs]
    with open(path + ".done", "a") as log:
        log.writelines(f"{hashlib.sha256(i.tobytes()).hexdigest()} {v}\\n" for i, v in zip(images, values))
    return values
'''
NUMBER = """
  number:
    use: function
    settings: {{target: "{folder}/number.py:number"}}
    max_batch_size: 2
"""


class RunningService:
    def __init__(self, process: subprocess.Popen[bytes], log: Path, url: str, headers: Mapping[str, str]) -> None:
        self.process, self.url = process, url
        self._log = log
        self.http = httpx.Client(base_url=url, headers=dict(headers), timeout=60, trust_env=False)

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text(encoding="utf-8").splitlines() if line[:1] == "{"]

    def pid_of(self, scorer: str) -> int:
        """Id of the newest process of a scorer."""
        up = [line["pid"] for line in self.log() if line["message"] == "scorer is up" and line["scorer"] == scorer]
        return up[-1]

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the lines of a metric with these labels; 0 for none."""
        expected = [f'{key}="{value}"' for key, value in labels.items()]
        lines = self.http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.partition("{")[0].split(" ")[0] == name]
        return sum(float(line.rpartition(" ")[2]) for line in found if all(label in line for label in expected))

    def post(self, body: bytes, **headers: str) -> httpx.Response:
        return self.http.post("/v1/score", content=body, headers=headers)

    def wait_until_up(self, timeout_s: float = 60) -> None:
        until = time.monotonic() + timeout_s
        while self.http.get("/ready").status_code != 200:
            assert time.monotonic() < until, self.log()[-5:]
            time.sleep(0.05)


@contextmanager
def running(
    folder: Path, settings: str, *, key: str = "", max_files: int | None = None, **environment: str
) -> Iterator[RunningService]:
    """A service with these settings, ended at the end. The reward `number` logs to `folder/scored.txt`.

    max_files: files that the service may have open.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "number.py").write_text(FUNCTION)
    (folder / "rewards.yaml").write_text(settings.format(folder=folder))
    log = folder / "log.jsonl"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "unirl.core",
                "reward-service",
                "serve",
                str(folder / "rewards.yaml"),
                "--port",
                "0",
            ],
            stdout=subprocess.PIPE,
            stderr=output,
            preexec_fn=None if max_files is None else lambda: setrlimit(RLIMIT_NOFILE, (max_files, max_files)),
            env={**os.environ, "SCORED": str(folder / "scored.txt"), "OMP_NUM_THREADS": "1", **environment},
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, log.read_text()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        service = RunningService(process, log, json.loads(line)["url"], headers)
        with service.http:
            yield service
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=20)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def connected(service: RunningService, sent: bytes = b"", *, timeout_s: float = 20) -> socket.socket:
    result = socket.create_connection(("127.0.0.1", httpx.URL(service.url).port or 0), timeout=timeout_s)
    result.sendall(sent)
    return result


def rest(connection: socket.socket) -> bytes:
    """What arrives until the service ends the connection; TimeoutError where it does not."""
    result = bytearray()
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            result += piece
    return bytes(result)


def values(reply: httpx.Response) -> list[float]:
    assert reply.status_code == 200, reply.text
    return decode(reply.content, ScoreReply).values


def scored(service: RunningService) -> list[str]:
    """Prompts that the reward `number` was called with, each call apart."""
    file = service._log.with_name("scored.txt")
    return file.read_text().splitlines() if file.exists() else []


def samples(prompts: list[str], *, first: str = "", pixels: torch.Tensor | None = None) -> ScoreInput:
    """Images with these prompts. first: begins the ids."""
    names = tuple(f"{first}s{row}" for row in range(len(prompts)))
    if pixels is None:
        pixels = torch.zeros(len(prompts), 3, 4, 4)
    return ScoreInput(
        sample_ids=names,
        group_ids=names,
        inputs=Inputs.of_texts(prompts),
        metadata=({},) * len(prompts),
        media=Media(kind="image", values=pixels),
    )


def request(name: str, batch: ScoreInput, *, scorer: str = "number", version: str = "", codec: Any = "raw") -> bytes:
    """The body of a request with this id."""
    wire = from_samples(batch, codec=codec)
    return encode(ScoreRequest(format=FORMAT, id=name, scorer=scorer, version=version, samples=wire))
