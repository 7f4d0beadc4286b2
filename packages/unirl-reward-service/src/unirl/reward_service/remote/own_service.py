"""A service that is started for one reward, and ends with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from unirl.core.errors import RewardFailed

__all__ = ["OwnService"]

END_WITHIN_S = 30.0


class OwnService:
    """`unirl reward-service serve FILE` on a free port of this machine, until it is closed or this process ends."""

    def __init__(self, file: Path, *, log: Path) -> None:
        """Returns when all scorers are up.

        log: of the service, in lines of JSON. Raises RewardFailed, with the last line, when it does not start.
        """
        command = ("-m", "unirl.core", "reward-service", "serve", str(file), "--host", "127.0.0.1", "--port", "0")
        with log.open("ab") as output:
            # A separate session: Ctrl-C is for the run, which saves and then closes its rewards.
            self._process = subprocess.Popen(
                [sys.executable, *command, "--end-with-stdin"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        assert self._process.stdout is not None and self._process.stdin is not None
        with self._process.stdout as output:
            line = output.readline()
        if not line:
            self._process.stdin.close()
            code, said = self._process.wait(), log.read_text(encoding="utf-8", errors="replace").strip()
            raise RewardFailed(
                f"reward.remote.serve: the service of {file} ended with exit code {code}: "
                f"{said.rpartition(chr(10))[2] or 'it said nothing'} Its log is {log}."
            )
        self.url: str = json.loads(line)["url"]

    def close(self) -> None:
        """Let requests in progress finish, and end it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
