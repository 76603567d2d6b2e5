"""`hf:` a model of the Hugging Face hub, through its own library, cache and offline mode."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmbuild.builder.sources.progress import Progress
from llmbuild.builder.sources.verify import (
    Sha256,
    directory_hashes,
    directory_mismatches,
    file_hash,
    sha256_error,
)
from llmbuild.errors import SourceError

# Weights as safetensors, configs, tokenizer, chat template. Pickles aren't ever downloaded.
ALLOWED_FILES = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja"]
# Subfolders and consolidated* hold the same weights once more, in other layouts.
IGNORED_FILES = ["*/*", "consolidated*"]

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_FORM = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>{_PART}))?(?:/(?P<file>[^\0\\]+\.gguf))?"
)


@dataclass(frozen=True)
class HubSource:
    """A repository of safetensors, or one GGUF file of it."""

    repo: str  # org/name
    revision: str | None  # branch, tag or commit
    file: str | None

    FORM = "hf:org/name[@revision][/file.gguf]"

    @classmethod
    def parse(cls, text: str) -> "HubSource | None":
        """The source that the text after `hf:` names, None if it is malformed."""
        match = _FORM.fullmatch(text)
        if match is None or {"", ".", ".."} & set((match["file"] or "file").split("/")):
            return None
        return cls(**match.groupdict())

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf:{self.repo}{revision}" + (f"/{self.file}" if self.file else "")


def fetch_hub(source: HubSource, sha256: Sha256, progress: Progress) -> Path:
    """The file or directory in the hub library's cache.

    Raises SourceError for whatever goes wrong in the library, for a repository without
    safetensors, and for hashes that differ. A file that differs is downloaded once more first, in
    case the cache was damaged; it stays in the library's cache, which isn't ours to clean.
    """
    if source.file is not None:
        expected = file_hash(source, sha256)
        hashes = {source.file: expected} if expected else {}
        path = _download_file(source, source.file, source.revision)
        snapshot = path.parents[source.file.count("/")]
    else:
        hashes = dict(directory_hashes(source, sha256))
        path = snapshot = _download_snapshot(source)
    damaged = directory_mismatches(snapshot, hashes, progress)
    if damaged:
        try:
            for mismatch in damaged:  # a snapshot's folder is named for its commit
                _download_file(source, mismatch.name, snapshot.name, force=True)
        except SourceError as error:
            raise sha256_error(source, damaged) from error
        again = {mismatch.name: mismatch.expected for mismatch in damaged}
        if still := directory_mismatches(snapshot, again, progress):
            raise sha256_error(source, still)
    return path


def _download_snapshot(source: HubSource) -> Path:
    import huggingface_hub as hub

    with _hub_errors(source):
        folder = Path(
            hub.snapshot_download(
                source.repo,
                revision=source.revision,
                allow_patterns=ALLOWED_FILES,
                ignore_patterns=IGNORED_FILES,
            )
        )
    if not any(folder.glob("*.safetensors")):
        raise SourceError(
            f"{source}: the repository holds no safetensors, and no pickle is ever loaded; "
            f"if it holds a GGUF file, name it: {source}/NAME.gguf"
        )
    return folder


def _download_file(source: HubSource, file: str, revision: str | None, force: bool = False) -> Path:
    import huggingface_hub as hub

    with _hub_errors(source):
        return Path(hub.hf_hub_download(source.repo, file, revision=revision, force_download=force))


@contextmanager
def _hub_errors(source: HubSource) -> Iterator[None]:
    """Turn what the library raises (its own, its HTTP client's and system errors) into ours."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        why = "the repository is gated: ask for access on its page, then set HF_TOKEN"
        raise SourceError(f"{source}: {why}") from error
    except errors.RepositoryNotFoundError as error:
        why = "no such repository, or a private one: check the name, or set HF_TOKEN"
        raise SourceError(f"{source}: {why}") from error
    except errors.RevisionNotFoundError as error:
        raise SourceError(f"{source}: no such revision") from error
    except errors.LocalEntryNotFoundError as error:
        why = "not in the hub's cache, and the hub can't be reached or HF_HUB_OFFLINE is set"
        raise SourceError(f"{source}: {why}") from error
    except errors.EntryNotFoundError as error:
        raise SourceError(f"{source}: the repository has no such file") from error
    except Exception as error:
        why = str(error).strip().partition("\n")[0]
        raise SourceError(f"{source}: {type(error).__name__}: {why}") from error
