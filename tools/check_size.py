"""Fail when a module of autotp can no longer be read in one sitting: `python tools/check_size.py`."""

from __future__ import annotations

import sys
from pathlib import Path

LIMIT = 400  # lines
PACKAGE = Path(__file__).resolve().parent.parent / "autotp"


def too_long(package: Path, limit: int = LIMIT) -> list[tuple[Path, int]]:
    """The package's files longer than `limit` lines, with their lengths, longest first."""
    lengths = [(path, len(path.read_text().splitlines())) for path in package.rglob("*.py")]
    return sorted(((p, n) for p, n in lengths if n > limit), key=lambda pair: -pair[1])


def main() -> int:
    found = too_long(PACKAGE)
    for path, lines in found:
        print(f"{path.relative_to(PACKAGE.parent)}: {lines} lines, more than {LIMIT}: split it")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
