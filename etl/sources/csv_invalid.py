"""Why a text is no value of its column's type."""

from __future__ import annotations


class InvalidValueError(ValueError):
    """The text is not a valid value of the type.

    Attributes:
        reason: What is wrong with it.
        cure: What to do about it.
    """

    def __init__(self, reason: str, cure: str = "correct the value, or declare the column as text") -> None:
        super().__init__(reason)
        self.reason = reason
        self.cure = cure
