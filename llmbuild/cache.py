"""Where llmbuild keeps what can be made again."""

import os
from pathlib import Path


def cache_root() -> Path:
    """$LLMBUILD_CACHE, or ~/.cache/llmbuild. The folder need not exist yet."""
    given = os.environ.get("LLMBUILD_CACHE")
    return Path(given).absolute() if given else Path.home() / ".cache" / "llmbuild"
