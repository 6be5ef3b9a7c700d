"""Calls of the user's own code, with errors that lead back to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import polars as pl

from etl.errors import EtlError, InternalError, RecordError
from etl.keyed_process import Timer
from etl.transformation import Row, Transformation

VALUE_SHOWN_CHARACTERS_MAX = 300

_Given = TypeVar("_Given")
_Returned = TypeVar("_Returned")

RAISED = (Exception, pl.exceptions.PanicException)
"""What a user's function may raise; a panic of polars is no Exception, and a thread that knew only those would die."""


def guarded(transformation: Transformation, function: Callable[[_Given], _Returned]) -> Callable[[_Given], _Returned]:
    """The function, but what it raises becomes an error that names place, function and row.

    The returned function raises :class:`~etl.errors.InternalError` with the original exception as its cause; an
    :class:`~etl.errors.EtlError` that the function raises on purpose is passed on as it is.
    """

    def call(given: _Given) -> _Returned:
        try:
            return function(given)
        except EtlError:
            raise
        except RAISED as error:
            raise failure(transformation, function, error, given) from error

    return call


def guarded_items(
    transformation: Transformation, function: Callable[[Row], Iterable[_Returned]]
) -> Callable[[Row], Iterator[_Returned]]:
    """Like :func:`guarded` for a function whose result is iterated, so that a generator's errors are caught as well."""

    def call(row: Row) -> Iterator[_Returned]:
        try:
            yield from function(row)
        except EtlError:
            raise
        except RAISED as error:
            raise failure(transformation, function, error, row) from error

    return call


@contextmanager
def evaluating(transformation: Transformation) -> Iterator[None]:
    """Around the evaluation of expressions.

    Raises:
        RecordError: A value does not allow what the expression asks for, e.g. a cast of text that is no number.
        InternalError: A Python function inside the expression raised, or polars itself broke down.
    """
    try:
        yield
    except (pl.exceptions.ComputeError, pl.exceptions.InvalidOperationError) as error:
        raise RecordError(_first_line(error)) from error
    except RAISED as error:
        raise InternalError(f"{transformation}: {type(error).__name__}: {_first_line(error)}") from error


def name_of(function: Callable[..., object]) -> str:
    """A function's name with file and line, where it has them."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    code = getattr(function, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else str(name)


def shortened(value: object) -> str:
    """A value's ``repr``, cut where it would flood a log."""
    shown = repr(value)
    return shown if len(shown) <= VALUE_SHOWN_CHARACTERS_MAX else shown[:VALUE_SHOWN_CHARACTERS_MAX] + "…"


def failure(
    transformation: Transformation, function: Callable[..., object], error: BaseException, given: object
) -> InternalError:
    """The error for what a user's function raised: it names place, function and row."""
    raised = f"{type(error).__name__}: {error}{given_shown(given)}"
    return InternalError(f"{transformation}: {name_of(function)} raised {raised}")


def given_shown(given: object) -> str:
    """For which row or timer a function was called, as the end of a message."""
    if isinstance(given, Timer):
        return f" for the timer of {shortened(given.key)} at {given.moment}"
    return f" for the row {shortened(given)}" if isinstance(given, dict) else ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
