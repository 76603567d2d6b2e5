"""What TensorRT says while it builds: kept, and never printed."""

from typing import Any


class CollectedLog:
    """Errors of one build. `logger` is what TensorRT is given."""

    def __init__(self, trt: Any) -> None:
        errors: list[str] = []

        class Logger(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                    errors.append(message.strip())

        self.errors = errors
        self.logger = Logger()

    def text(self) -> str:
        """All errors, each once."""
        return "; ".join(dict.fromkeys(self.errors)) or "it gave no reason"
