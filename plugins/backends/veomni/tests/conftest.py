"""Makes the cases importable here as they are for the script that runs them on several ranks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
