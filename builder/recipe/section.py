"""The base of a recipe's records, and what their fields share."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


def listed(value: Any) -> Any:
    """A YAML list as the tuple that frozen records hold."""
    return tuple(value) if isinstance(value, list) else value


class Section(BaseModel):
    """Base of a recipe's records. A field's description says what is allowed."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _may_be_left_empty(cls, value: Any) -> Any:
        return {} if value is None else value
