"""A reward service under load: throughput, latency percentiles, memory, with every score checked.

    python benchmarks/reward_service.py                     # 10,000 requests, 64 clients, 64 px images
    python benchmarks/reward_service.py --clients 500 --pixels 256 --encoding png

The scorer is `brightness`, which takes next to no time, so the numbers are those of the service. Client and service
share this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
import torch
from unirl.core.roles import ScoreInput
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.reward_service.wire import FORMAT, ScoreReply, ScoreRequest, decode, encode, from_samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=64, help="requests in flight at a time")
    parser.add_argument("--samples", type=int, default=8, help="samples of a request")
    parser.add_argument("--pixels", type=int, default=64, help="height and width")
    parser.add_argument("--encoding", choices=("raw", "png", "webp"), default="raw")
    parser.add_argument("--queue", type=int, default=64, help="max_queue of the scorer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "rewards.yaml", Path(folder) / "log.jsonl"
        file.write_text(f"scorers: {{light: {{use: brightness, max_queue: {args.queue}, max_batch_size: 256}}}}\n")
        command = [sys.executable, "-m", "unirl.core", "reward-service", "serve", str(file), "--port", "0"]
        with log.open("wb") as errors:
            service = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        assert service.stdout is not None
        try:
            url = json.loads(service.stdout.readline())["url"]
            started = [json.loads(line) for line in log.read_text().splitlines()]
            pids = {"gateway": service.pid, "scorer": next(line["pid"] for line in started if "pid" in line)}
            asyncio.run(load(url, args, pids))
        finally:
            service.terminate()
            service.wait()


async def load(url: str, args: argparse.Namespace, pids: dict[str, int]) -> None:
    bodies = [body(number, args) for number in range(64)]
    expected = [scores_of(number, args) for number in range(64)]
    seconds: list[float] = []
    codes: Counter[int] = Counter()
    numbers = iter(range(args.requests))
    limits = httpx.Limits(max_connections=args.clients, max_keepalive_connections=args.clients)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300, trust_env=False) as http:

        async def client() -> None:
            for number in numbers:
                name = f"{number:032}"
                # Only the id differs; encoding each request anew would load this process.
                content = bodies[number % 64].replace(b"0" * 32, name.encode(), 1)
                began = time.perf_counter()
                while True:
                    try:
                        reply = await http.post("/v1/score", content=content)
                    except httpx.TransportError:
                        # Under its id, as the reward `remote` sends it again.
                        codes[0] += 1
                        continue
                    codes[reply.status_code] += 1
                    if reply.status_code != 429:
                        break
                    await asyncio.sleep(0.1)
                seconds.append(time.perf_counter() - began)
                scores = decode(reply.content, ScoreReply)
                assert scores.id == name and torch.allclose(torch.tensor(scores.values), expected[number % 64])

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(args.clients)))
        wall = time.perf_counter() - began
        metrics = (await http.get("/metrics")).text
    assert len(seconds) == args.requests
    assert f'unirl_reward_samples_total{{scorer="light"}} {float(args.requests * args.samples)}' in metrics
    ordered = sorted(seconds)
    at = {share: ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000 for share in (0.5, 0.95, 0.99)}
    size = len(bodies[0]) / 1e6
    print(f"{os.cpu_count()} CPU cores, torch {torch.__version__}; {args.encoding}, {size:.3f} MB a request")
    print(f"{args.requests} requests of {args.samples} samples, {args.clients} at a time, {wall:.1f} s")
    print(f"{args.requests / wall:.0f} requests/s, {args.requests * args.samples / wall:.0f} samples/s, ", end="")
    print(f"{args.requests * size / wall:.0f} MB/s")
    print(f"sent again after 429: {codes[429]}, after a lost connection: {codes[0]}")
    print(
        ", ".join(f"p{share * 100:g} {value:.0f} ms" for share, value in at.items()), f"max {ordered[-1] * 1000:.0f} ms"
    )
    print(", ".join(f"{name} {peak_mb(pid):.0f} MB" for name, pid in pids.items()), "at most")


def images(number: int, args: argparse.Namespace) -> torch.Tensor:
    random = torch.Generator().manual_seed(number)
    return torch.randint(256, (args.samples, 3, args.pixels, args.pixels), generator=random).float() / 255


def scores_of(number: int, args: argparse.Namespace) -> torch.Tensor:
    return images(number, args).mean(dim=(2, 3)) @ torch.tensor([0.299, 0.587, 0.114])


def body(number: int, args: argparse.Namespace) -> bytes:
    names = tuple(f"s{row}" for row in range(args.samples))
    batch = ScoreInput(
        sample_ids=names,
        group_ids=names,
        inputs=Inputs.of_texts(names),
        metadata=({},) * args.samples,
        media=Media(kind="image", values=images(number, args)),
    )
    wire = from_samples(batch, codec=args.encoding)
    return encode(ScoreRequest(format=FORMAT, id="0" * 32, scorer="light", version="", samples=wire))


def peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1000


if __name__ == "__main__":
    main()
