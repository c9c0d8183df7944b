"""What these programs take from others, asked for in one place: where it is not there a line says how to get it."""

import importlib.util
import os
import sys


def require(*names):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"error: {os.path.basename(sys.argv[0])} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
