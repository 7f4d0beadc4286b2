"""The README's example runs as it stands."""

import re
from pathlib import Path


def test_the_readme_example_runs():
    readme = Path(__file__).parents[1] / "README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(compile(example, str(readme), "exec"), {})
