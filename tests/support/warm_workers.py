"""Ray workers that start with everything imported: a worker of the quickstart spends 7 s of CPU on imports,
and the tests start dozens. Ray runs `python()` in place of the interpreter (`py_executable`), see `fork_server`."""

from __future__ import annotations

import functools
import os
import sys

import fork_server
from unirl.runtime.ray_worker import SETTINGS

PRELOAD = (
    "unirl.runtime.worker",
    "unirl.models.sd3.checkpoint",
    "unirl.models.sd3.model",
    "unirl.engines.trainside.engine",
    "unirl.backends.fsdp2.backend",
    "unirl.train_host.adapters",
    "unirl.algorithms.flow_grpo.algorithm",
    "unirl.rewards.rules.shapes",
    "unirl.rewards.rules.brightness",
)
PRELOAD_OF_RAY = (
    "google.protobuf.json_format",
    "jsonschema",
    "pydantic.deprecated.class_validators",
    "pydantic.fields",
    "pydantic.v1",
    "starlette.datastructures",
)
"""What Ray imports in a worker, where it is installed, before the first call: 0.4 s of CPU. Ray itself reads the job of
the worker from the environment when it is imported, and pyarrow starts a thread."""


@functools.cache
def python() -> str:
    """The path of the stub, one for all tests of a process."""
    environment = {**os.environ, **SETTINGS, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return fork_server.stub(
        sys.executable, preload=PRELOAD, optional=PRELOAD_OF_RAY, environment=tuple(environment.items())
    )
