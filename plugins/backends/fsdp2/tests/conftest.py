"""Makes the toy importable here as it is for the script of the two-rank test."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
