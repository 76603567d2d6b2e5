"""What llmbuild raises. A `UserError` is the user's to mend: its text says what was given,
what is allowed and what to change, and the CLI prints it alone and exits 2. An `InternalError`
is ours, and the CLI exits 1."""


class LlmbuildError(Exception):
    """Base of every error that llmbuild raises on purpose."""


class UserError(LlmbuildError):
    """Something given to llmbuild can't be used as it is."""


class RecipeError(UserError):
    """The recipe is malformed, contradicts itself, or asks for what isn't supported."""


class SourceError(UserError):
    """A model source can't be fetched, or its bytes aren't the expected ones."""


class CheckpointError(UserError):
    """A checkpoint's files, names, shapes or types aren't what its config calls for."""


class ModelError(UserError):
    """A model config asks for something that no family here understands."""


class BuildError(UserError):
    """The build can't go on: a tool is missing, or the output path can't be used."""


class EngineError(UserError):
    """An engine directory is refused: incomplete, altered, or not for this machine."""


class RequestError(UserError):
    """A generation request is refused: it is malformed or larger than the engine's limits."""


class InternalError(LlmbuildError):
    """A fault of llmbuild itself, found by one of its own checks."""


class RankError(LlmbuildError):
    """A rank of an engine is gone, or doesn't answer, in the middle of its work."""

    def __init__(self, rank: int, text: str | None = None) -> None:
        super().__init__(text or f"rank {rank} is gone or doesn't answer")
        self.rank = rank
