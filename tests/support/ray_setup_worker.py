"""What Ray runs to become a worker, without Ray: its own `setup_worker.py` imports Ray, 0.4 s of CPU, to do no more.

The raylet starts it as `python ray_setup_worker.py --serialized-runtime-env-context=JSON --language=PYTHON ARGUMENTS`.
"""

from __future__ import annotations

import json
import os
import sys

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main(arguments: list[str]) -> None:
    (context,) = (json.loads(word.removeprefix(CONTEXT)) for word in arguments if word.startswith(CONTEXT))
    os.environ.update({name: os.path.expandvars(value) for name, value in context["env_vars"].items()})
    python = context["py_executable"]
    os.execv(python, [python, *(word for word in arguments if not word.startswith((CONTEXT, LANGUAGE)))])


if __name__ == "__main__":
    main(sys.argv[1:])
