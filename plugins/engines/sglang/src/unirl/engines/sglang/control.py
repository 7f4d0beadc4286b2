"""Keys under which the server's calls of the worker travel in SGLang's requests."""

from __future__ import annotations

__all__ = ["ANSWER", "BRIDGE_VARIABLE", "CALL"]

BRIDGE_VARIABLE = "UNIRL_SGLANG_BRIDGE"
"""Environment variable that tells SGLang's processes the bridge: the plugin beside this reads it."""
CALL = "unirl_call"
"""Key of a request's extras: a method of the pipeline, and its arguments."""
ANSWER = "unirl_answer"
"""Key of an output's usage: what that returned."""
