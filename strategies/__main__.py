"""The command `kindred`: hands over to the application, from which runs are started.

The library is installed as `kindred`, the application imports it as `strategies`; the two never meet in one
process, hence a process of its own for the application, with the application's folder first on its path.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

START = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from server_app.cli import main
main()
"""


def main() -> NoReturn:
    """Start the application's command line, or end with code 2 where there is no application."""
    above = Path(__file__).resolve().parent.parent  # the clone, of an editable installation
    for folder in (above, Path.cwd()):
        if (folder / "server_app" / "cli.py").is_file() and (folder / "pyproject.toml").is_file():
            os.execv(sys.executable, [sys.executable, "-P", "-c", START, str(folder), *sys.argv[1:]])
    print(f"kindred: {Path.cwd()} holds no application; go to a clone of the repository, the installed package is the "
          "library alone", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
