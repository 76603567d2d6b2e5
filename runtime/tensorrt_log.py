"""What TensorRT says while it builds a plan or runs one: kept, and never printed."""

from typing import Any

_MOST = 20


class CollectedLog:
    """The last errors, each once. `logger` is what TensorRT is given."""

    def __init__(self, trt: Any) -> None:
        errors: list[str] = []

        class Logger(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                    errors[:] = dict.fromkeys([*errors[-_MOST:], message.strip()])

        self.errors = errors
        self.logger = Logger()

    def text(self) -> str:
        return "; ".join(self.errors) or "TensorRT gave no reason"
