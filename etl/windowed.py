"""Aggregations in windows of event time, as inert data; carried out by :mod:`etl.operators.keyed`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import ClassVar

from etl.accumulator import CustomColumn
from etl.errors import ConfigurationError, Finding
from etl.keyed import Aggregate, AggregateColumn, AggregateKind, Emission
from etl.schema import Field, Schema
from etl.window import Session, Sliding, Tumbling, Window, lateness_findings

WINDOW_START, WINDOW_END = "window_start", "window_end"
"""Columns of the results."""


@dataclass(frozen=True, slots=True, eq=False)
class WindowAggregate(Aggregate):
    """One row of results for each key and window.

    Attributes:
        window: Which windows.
        time: Column that says when a row happened.
        lateness: For how long after its end a window still takes rows.
    """

    kind = "window aggregate"
    emissions: ClassVar[tuple[Emission, ...]] = (Emission.CLOSE, Emission.CHECKPOINT)

    _: KW_ONLY
    window: Window
    time: str
    lateness: timedelta = timedelta(0)

    @property
    def event_time_columns(self) -> tuple[str, ...]:
        """The column of time."""
        return (self.time,)

    @property
    def emits_again(self) -> bool:
        """Unless each window is emitted when it closes, and then takes no more rows."""
        return self.emission is not Emission.CLOSE or self.lateness > timedelta(0)

    @property
    def result_keys(self) -> tuple[str, ...]:
        """The key's columns and the start of the window."""
        return (*self.keys, WINDOW_START)

    def output_schema(self, inputs: Sequence[Schema]) -> Schema:
        """The key's columns, start and end of the window, then one column for each expression."""
        columns = self.columns(inputs[0])
        moment = inputs[0][self.time]
        borders = (Field(WINDOW_START, moment), Field(WINDOW_END, moment))
        results = (Field(column.name, column.type) for column in columns)
        return Schema((*self.key_fields(inputs[0]), *borders, *results))

    def columns(self, schema: Schema) -> tuple[AggregateColumn | CustomColumn, ...]:
        """See :meth:`etl.keyed.Aggregate.columns`."""
        findings = [*self.event_time_findings([schema]), *self._window_findings(schema)]
        columns: tuple[AggregateColumn | CustomColumn, ...] = ()
        try:
            columns = Aggregate.columns(self, schema)
        except ConfigurationError as error:
            findings += error.findings
        findings += self._session_findings(columns)
        if findings:
            raise ConfigurationError.from_findings(str(self), findings)
        return columns

    def describe(self) -> str:
        """Key, windows and columns."""
        late = f", up to {self.lateness} late" if self.lateness else ""
        return f"{Aggregate.describe(self)} in {self.window} of {self.time}{late}"

    def _window_findings(self, schema: Schema) -> Iterable[Finding]:
        yield from lateness_findings(str(self), self.lateness)
        window: object = self.window
        if not isinstance(window, Tumbling | Sliding | Session):
            cure = "give Tumbling(timedelta(hours=1)), Sliding(…, every=…) or Session(…)"
            yield self.finding(f"{window!r} is no window", cure)
            return
        wrong = list(window.findings(str(self)))
        yield from wrong
        if not wrong and self.time in schema and schema[self.time].name == "date" and not window.is_of_days():
            problem = f'"{self.time}" is a date, and {window} do not begin and end at midnight'
            yield self.finding(problem, "choose whole days, or a column of type timestamp")

    def _name_findings(self, declared: Schema) -> Iterable[Finding]:
        yield from Aggregate._name_findings(self, declared)
        for name in (WINDOW_START, WINDOW_END):
            if name in self.keys or name in dict(self.expressions):
                yield self.finding(f'column "{name}" is that of the window', "give yours another name")

    def _session_findings(self, columns: Sequence[AggregateColumn | CustomColumn]) -> Iterable[Finding]:
        """Sessions merge, so a result that went out early could be that of a session which is none any more."""
        if not isinstance(self.window, Session):
            return
        if self.emission is Emission.CHECKPOINT:
            yield self.finding(
                "a session that has been emitted may become a part of another one, and its row would stay",
                'choose emit="close"',
            )
        if isinstance(self.lateness, timedelta) and self.lateness:
            problem = "a late row may connect sessions that have been emitted, and their rows would stay"
            yield self.finding(problem, "leave out lateness=…; a source may promise more out_of_orderness=… instead")
        for column in columns:
            if isinstance(column, AggregateColumn) and column.kind in (AggregateKind.FIRST, AggregateKind.LAST):
                problem = f'column "{column.name}": sessions merge, and which row came {column.kind} is not kept'
                cure = f'go by time, e.g. pl.col(…).sort_by("{self.time}").{column.kind}()'
                yield self.finding(problem, cure)
