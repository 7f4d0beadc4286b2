"""`python -m unirl.core` is `unirl`, for interpreters whose scripts are not on the path."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
