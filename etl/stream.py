"""What a user writes of a job's rows: streams, each method of which describes a further step.

Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from etl.accumulator import Accumulator, ExpressionAccumulator
from etl.errors import ConfigurationError
from etl.graph import Declaration, DeclaredSink, DeclaredTransformation
from etl.joins import AsOfJoin, IntervalJoin, Join, JoinKind, LookupJoin
from etl.keyed import (
    Aggregate,
    Deduplicate,
    Emission,
    Stateful,
)
from etl.keyed_process import KeyFunction, Process, StateSpec, TimerFunction, Upcaster
from etl.lazy import LazyModule
from etl.lookup import Lookup
from etl.operator import LATE, LATE_RIGHT
from etl.sink import Sink
from etl.transformation import (
    Filter,
    FlatMap,
    FrameFunction,
    Location,
    Map,
    MapBatches,
    Rebalance,
    RowColumn,
    RowFunction,
    RowPredicate,
    RowsFunction,
    RowValue,
    Select,
    SideStream,
    Transformation,
    Union,
    WithColumns,
)
from etl.window import Window
from etl.windowed import WindowAggregate

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")


class Declarations:
    """What a job declares, in the order in which it does.

    Args:
        job: The job's name, for messages.

    Attributes:
        items: All of it; streams are numbers of them.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self.items: list[Declaration] = []

    def add(self, declaration: Declaration) -> int:
        """Append one; returns its number."""
        self.items.append(declaration)
        return len(self.items) - 1

    def __repr__(self) -> str:
        return f"Job({self._job!r})"


class Stream:
    """Rows on their way; every method describes a further step and returns the stream behind it.

    Expressions and functions see one row at a time. Functions get a dict with exact Python values and must return
    exact ones: ``Decimal`` for numeric, aware ``datetime`` for timestamptz; nothing is converted silently.
    """

    def __init__(self, declarations: Declarations, index: int) -> None:
        self._declarations = declarations
        self._index = index

    def filter(self, predicate: pl.Expr | RowPredicate, *, deterministic: bool = True) -> Stream:
        """Keep the rows for which the predicate is true; false and NULL (None) drop the row.

        Args:
            predicate: A polars expression, or a function from a row to a bool.
            deterministic: False when the same row may be judged otherwise the next time.
        """
        return self._then(Filter(Location.of_caller(), predicate, deterministic=deterministic))

    def select(
        self, *columns: str | pl.Expr, schema: Mapping[str, str] | None = None, **named: str | pl.Expr
    ) -> Stream:
        """Exactly these columns, in this order.

        Args:
            columns: Names of columns, or polars expressions.
            schema: Column types to declare where the expression leaves a choice, e.g. ``{"payload": "jsonb"}``.
            named: Columns or expressions under new names.
        """
        plain = [_expression(column) for column in columns]
        renamed = [_named(name, _expression(column)) for name, column in named.items()]
        return self._then(Select(Location.of_caller(), (*plain, *renamed), schema))

    def with_columns(
        self,
        *columns: pl.Expr,
        schema: Mapping[str, str] | None = None,
        deterministic: bool = True,
        **named: pl.Expr | RowValue,
    ) -> Stream:
        """All columns, some of them replaced, new ones added at the end; all see the row as it came.

        Args:
            columns: Polars expressions; they replace or add the column of their output name.
            schema: Column types; needed for columns that are computed by functions.
            deterministic: False when the same row may yield other values the next time.
            named: Expressions, or functions from a row to a value, by column name.
        """
        added = (_column(name, value) for name, value in named.items())
        transformation = WithColumns(Location.of_caller(), (*columns, *added), schema, deterministic=deterministic)
        return self._then(transformation)

    def map(
        self, function: RowFunction, *, schema: Mapping[str, str] | None = None, deterministic: bool = True
    ) -> Stream:
        """One row for each row.

        Args:
            function: From a row to a row with exactly the declared columns.
            schema: Columns and types it returns; the input's when left out.
            deterministic: False when the same row may yield another one the next time.
        """
        return self._then(Map(Location.of_caller(), function, schema, deterministic=deterministic))

    def flat_map(
        self, function: RowsFunction, *, schema: Mapping[str, str] | None = None, deterministic: bool = True
    ) -> Stream:
        """Any number of rows for each row.

        Args:
            function: From a row to rows with exactly the declared columns; may be a generator function.
            schema: Columns and types of the rows; the input's when left out.
            deterministic: False when the same row may yield others the next time.
        """
        return self._then(FlatMap(Location.of_caller(), function, schema, deterministic=deterministic))

    def map_batches(
        self, function: FrameFunction, *, schema: Mapping[str, str] | None = None, deterministic: bool = True
    ) -> Stream:
        """A polars frame for each batch. Where batches end is not defined, so rows must be treated independently.

        Args:
            function: From a frame to a frame, with any number of rows.
            schema: Columns and types it returns; when left out, it is called with an empty frame to find out.
            deterministic: False when the same rows may yield others the next time.
        """
        return self._then(MapBatches(Location.of_caller(), function, schema, deterministic=deterministic))

    def union(self, *others: Stream) -> Stream:
        """The rows of this stream and the others, which must have the same columns.

        The order between the streams is not defined.

        Raises:
            ConfigurationError: A stream belongs to another job.
        """
        location = Location.of_caller()
        for other in others:
            if not isinstance(other, Stream) or other._declarations is not self._declarations:
                raise ConfigurationError(f"union at {location}: {other!r} is not a stream of {self._declarations!r}")
        if not others:
            raise ConfigurationError(f"union at {location}: no other stream is given")
        inputs = (self._index, *(other._index for other in others))
        return Stream(self._declarations, self._declarations.add(DeclaredTransformation(Union(location), inputs)))

    def rebalance(self, parallelism: int) -> Stream:
        """The same rows, dealt out batch by batch to several subtasks, in which the steps behind run side by side.

        The order of rows is not defined from there on.

        Args:
            parallelism: Number of subtasks; it may change from run to run.
        """
        return self._then(Rebalance(Location.of_caller(), parallelism))

    def key_by(self, *columns: str) -> KeyedStream:
        """The rows by key, for operators that remember something of each key.

        Args:
            columns: Names of columns; NULL is a key like any other. Compute others with ``with_columns`` before.
        """
        return KeyedStream(self, columns)

    def deduplicate(
        self,
        uid: str,
        keys: Sequence[str] | str,
        *,
        ttl: timedelta | None = None,
        time: str | None = None,
        parallelism: int | None = None,
        keys_in_memory: int | None = None,
    ) -> ResultStream:
        """The first row of each key and no other, over all runs of the job.

        Args:
            uid: Name of the operator within the job; the keys it has seen are stored under it.
            keys: Columns that make the key; NULL is a key like any other.
            ttl: How long a key is remembered; for ever when left out. A row is dropped when one of the same key that
                was let pass lies less than that from it.
            time: The column of event time by which that is measured; the clock, at which rows come, when left out. Rows
                behind the watermark cannot be judged: they are late.
            parallelism: Number of subtasks; the job's when left out.
            keys_in_memory: How many keys each subtask keeps in memory from one checkpoint to the next; those not used
                for longest go to disk. All when left out.
        """
        # anything else is left as it is: the graph's validation reports it together with all other mistakes
        columns = tuple(keys) if isinstance(keys, list | tuple) else (keys,)
        transformation = Deduplicate(
            Location.of_caller(), uid, columns, ttl, time, parallelism=parallelism, keys_in_memory=keys_in_memory
        )
        return self._results(transformation)

    def lookup_join(
        self,
        uid: str,
        lookup: Lookup,
        *,
        on: Sequence[str] | str,
        how: JoinKind | str = JoinKind.LEFT,
        suffix: str = "_right",
        cache_rows: int = 100_000,
        cache_ttl: timedelta = timedelta(minutes=10),
    ) -> Stream:
        """Each row with the row of its key in a table, as that is when it is asked for.

        ::

            customers = PostgresLookup("customers", key="id", columns={"id": "int8", "name": "text"})
            orders.lookup_join("named", customers, on="customer_id")

        One question is asked for all keys of a batch that are not remembered. Nothing of it is stored, and a replay
        may find something else: for what was valid at a time see :meth:`KeyedStream.as_of_join`.

        Args:
            uid: Name of the operator within the job.
            lookup: The table, e.g. ``PostgresLookup(…)``.
            on: Columns of the stream that make the key, in the lookup's order. A key with NULL in it is not there.
            how: ``"left"``: all rows; what is not there is NULL. ``"inner"``: those whose key is there.
            suffix: Appended to the names of those columns of the table that the stream has too.
            cache_rows: How many keys are remembered, those that are not there included; the ones that were used last.
            cache_ttl: For how long a key is remembered at most; zero asks for each batch.

        Returns:
            All columns of the stream, then those of the table but its key.
        """
        # anything else is left as it is: the graph's validation reports it together with all other mistakes
        keys = tuple(on) if isinstance(on, list | tuple) else (on,)
        transformation = LookupJoin(
            Location.of_caller(),
            uid,
            lookup,
            keys,
            _join_kind(how),
            suffix,
            cache_rows,
            cache_ttl,
            deterministic=False,
        )
        return self._then(transformation)

    def write(self, uid: str, sink: Sink) -> None:
        """Write the rows.

        Args:
            uid: Name of the sink within the job; what it has committed is recorded under it.
            sink: Where to and how, e.g. ``TwoPhaseCommitSink(PostgresTable("orders"))``.
        """
        self._declarations.add(DeclaredSink(uid, sink, self._index, Location.of_caller()))

    def _then(self, transformation: Transformation) -> Stream:
        declared = DeclaredTransformation(transformation, (self._index,))
        return Stream(self._declarations, self._declarations.add(declared))

    def _results(self, transformation: Stateful) -> ResultStream:
        return ResultStream(self._declarations, self._then(transformation)._index)

    def __repr__(self) -> str:
        return f"Stream({self._declarations!r}, {self._index})"


class ResultStream(Stream):
    """What an operator that works by event time yields."""

    def __init__(self, declarations: Declarations, index: int) -> None:
        super().__init__(declarations, index)
        self._late: Stream | None = None

    @property
    def late(self) -> Stream:
        """The rows that came after what they belong to was closed, with the columns that they had before the operator.

        Without this they are counted, and dropped.
        """
        if self._late is None:
            self._late = self._then(SideStream(Location.of_caller(), LATE))
        return self._late


class JoinStream(ResultStream):
    """What a join of two streams yields; ``late`` are the late rows of the left."""

    def __init__(self, declarations: Declarations, index: int) -> None:
        super().__init__(declarations, index)
        self._late_right: Stream | None = None

    @property
    def late_right(self) -> Stream:
        """The late rows of the right, with the columns that they had before the join."""
        if self._late_right is None:
            self._late_right = self._then(SideStream(Location.of_caller(), LATE_RIGHT))
        return self._late_right


class KeyedStream:
    """Rows by key; see :meth:`Stream.key_by`."""

    def __init__(self, stream: Stream, keys: tuple[str, ...]) -> None:
        self._stream = stream
        self._keys = keys

    def aggregate(
        self,
        uid: str,
        *,
        schema: Mapping[str, str] | None = None,
        emit: Emission | str = Emission.CHECKPOINT,
        parallelism: int | None = None,
        keys_in_memory: int | None = None,
        **expressions: pl.Expr | Accumulator | ExpressionAccumulator,
    ) -> Stream:
        """One row of results for each key, over all rows of all runs; it is emitted again when it has changed.

        Write it through a sink that keeps the last row of a key, e.g.
        ``UpsertSink(PostgresTable("totals", key=["customer_id"]))``.

        Args:
            uid: Name of the operator within the job; the results are stored under it.
            schema: Types of sums where another exact one is wanted, e.g. ``{"total": "numeric(38,0)"}``.
            emit: ``"checkpoint"``: each changed key once a checkpoint. ``"update"``: after each batch that changed it.
            parallelism: Number of subtasks; the job's when left out.
            keys_in_memory: How many keys each subtask keeps in memory from one checkpoint to the next; those not used
                for longest go to disk. All when left out.
            expressions: By name of the result, polars aggregates: ``pl.len()``, and ``count``, ``sum``, ``min``,
                ``max``, ``mean``, ``first``, ``last`` of an expression over single rows;
                ``pl.col("status").sort_by("at").last()`` for the value of the row that is last in another column;
                or an :class:`~etl.accumulator.Accumulator` of your own.
        """
        transformation = Aggregate(
            Location.of_caller(),
            uid,
            self._keys,
            tuple(expressions.items()),
            schema,
            _emission(emit),
            parallelism=parallelism,
            keys_in_memory=keys_in_memory,
        )
        return self._stream._then(transformation)

    def window(
        self,
        window: Window,
        *,
        time: str,
        lateness: timedelta = timedelta(0),
        emit: Emission | str = Emission.CLOSE,
    ) -> WindowedStream:
        """The rows by key and window of event time, for :meth:`WindowedStream.aggregate`.

        ::

            hourly = (
                payments.key_by("card")
                .window(Tumbling(timedelta(hours=1)), time="at")
                .aggregate("per-hour", total=pl.col("amount").sum())
            )
            hourly.late.write("too-late", …)

        Args:
            window: :class:`Tumbling`, :class:`Sliding` or :class:`Session`.
            time: The column that says when a row happened: that of the source's event time, whatever it is called here.
            lateness: For how long after its end a window still takes rows; its result is then emitted again. Not for
                sessions.
            emit: ``"close"``: each window when it closes. ``"checkpoint"``: each that has changed once a checkpoint,
                also before it closes; not for sessions.
        """
        return WindowedStream(self._stream, self._keys, window, time, lateness, _emission(emit))

    def process(
        self,
        uid: str,
        function: KeyFunction,
        *,
        state: Mapping[str, StateSpec],
        upcast: Sequence[Upcaster] = (),
        forget: Sequence[str] = (),
        schema: Mapping[str, str] | None = None,
        time: str | None = None,
        in_order: bool = False,
        on_timer: TimerFunction | None = None,
        on_clock_timer: TimerFunction | None = None,
        ttl: timedelta | None = None,
        deterministic: bool = True,
        parallelism: int | None = None,
        keys_in_memory: int | None = None,
    ) -> ResultStream:
        """Any number of rows for each row, by a function that remembers something of each key.

        ::

            def jumps(payment, state):
                before, state.last.value = state.last.value, payment["amount"]
                if before is not None and payment["amount"] > 10 * before:
                    yield payment

            payments.key_by("card").process("jumps", jumps, state={"last": ValueState("numeric(12,2)")})

        Args:
            uid: Name of the operator within the job; what it remembers is stored under it.
            function: From a row and the state of its key to rows with exactly the declared columns; may be a generator
                function, and may return None for no row. The rows of a key come in their order.
            state: By the name of the attribute: :class:`ValueState`, :class:`ListState` or :class:`MapState`. A key of
                which all states are empty is forgotten. One that is new begins empty.
            upcast: What becomes of state that was stored in former shapes, one for each: needed where the type of a
                state has changed. Without timers and ttl only.
            forget: Names of former states that are given up on purpose.
            schema: Columns and types of the rows; the input's when left out.
            time: The column of event time; needed by ``in_order`` and ``on_timer``, and measure of ``ttl``.
            in_order: The rows of a key come in the order of their times, as soon as the watermark has passed them, with
                the timers between them. Those behind the watermark are late.
            on_timer: From a :class:`Timer` and the state of its key to rows, for what ``state.timers.set(moment)`` has
                set: when the watermark reaches the moment.
            on_clock_timer: The same for ``state.clock_timers``: when the clock reaches the moment.
            ttl: A key whose state was not written for so long is forgotten: by ``time``, or by the clock without it.
            deterministic: False when the same rows may yield others the next time.
            parallelism: Number of subtasks; the job's when left out.
            keys_in_memory: How many keys each subtask keeps in memory from one checkpoint to the next; those not used
                for longest go to disk. All when left out.
        """
        transformation = Process(
            Location.of_caller(),
            uid,
            self._keys,
            function,
            state,
            schema,
            time,
            in_order,
            on_timer,
            on_clock_timer,
            ttl,
            tuple(upcast),
            tuple(forget),
            deterministic=deterministic,
            parallelism=parallelism,
            keys_in_memory=keys_in_memory,
        )
        return self._stream._results(transformation)

    def interval_join(
        self,
        uid: str,
        right: KeyedStream,
        *,
        time: tuple[str, str] | str,
        lower: timedelta,
        upper: timedelta,
        how: JoinKind | str = JoinKind.INNER,
        suffix: str = "_right",
        parallelism: int | None = None,
    ) -> JoinStream:
        """Pairs of rows with the same key, of which the right one happened within a span around the left one.

        ::

            payments = payments.key_by("order_id")
            span = {"lower": timedelta(0), "upper": timedelta(hours=1)}
            orders.key_by("id").interval_join("paid", payments, time=("at", "paid_at"), **span)

        Both streams need event time. A key with NULL in it has no partner.

        Args:
            uid: Name of the operator within the job; the rows that wait are stored under it.
            right: The other stream, keyed by columns of the same types.
            time: The columns that say when a row of the left and of the right happened; one name where it is the same.
            lower: Least of the right's time less the left's, itself included; may be negative.
            upper: Most of it, itself included.
            how: ``"inner"``: pairs only. ``"left"``, ``"right"``, ``"full"``: rows of the left, the right or both that
                have no partner come out as well, once, as soon as none can come any more; what is not there is NULL.
            suffix: Appended to the names of those columns of the right that the left has too.
            parallelism: Number of subtasks; the job's when left out.

        Returns:
            All columns of the left, then those of the right but its key.

        Raises:
            ConfigurationError: The right is no keyed stream of the same job.
        """
        location = Location.of_caller()
        index = self._right_index(right, "interval_join", location)
        transformation = IntervalJoin(
            location,
            uid,
            self._keys,
            right._keys,
            _both(time),
            lower,
            upper,
            how=_join_kind(how),
            suffix=suffix,
            parallelism=parallelism,
        )
        return self._join(transformation, index)

    def as_of_join(
        self,
        uid: str,
        right: KeyedStream,
        *,
        time: tuple[str, str] | str,
        how: JoinKind | str = JoinKind.INNER,
        suffix: str = "_right",
        parallelism: int | None = None,
    ) -> JoinStream:
        """Each row with the version of its key that was valid when it happened.

        ::

            orders.key_by("currency").as_of_join("rated", rates.key_by("currency"), time=("at", "valid_from"))

        A version is a row of the right; it is valid from its time on until the next one of its key begins. A row waits
        until event time says that all versions before it have come. Both streams need event time.

        Args:
            uid: Name of the operator within the job; versions, and rows that wait, are stored under it.
            right: The versions, keyed by columns of the same types.
            time: The columns that say when a row of the left happened and from when on a version is valid; one name
                where it is the same.
            how: ``"inner"``: rows that have a version. ``"left"``: the others as well; what is not there is NULL.
            suffix: Appended to the names of those columns of the right that the left has too.
            parallelism: Number of subtasks; the job's when left out.

        Returns:
            All columns of the left, then those of the right but its key.

        Raises:
            ConfigurationError: The right is no keyed stream of the same job.
        """
        location = Location.of_caller()
        index = self._right_index(right, "as_of_join", location)
        transformation = AsOfJoin(
            location,
            uid,
            self._keys,
            right._keys,
            _both(time),
            how=_join_kind(how),
            suffix=suffix,
            parallelism=parallelism,
        )
        return self._join(transformation, index)

    def _right_index(self, right: object, method: str, location: Location) -> int:
        if not isinstance(right, KeyedStream) or right._stream._declarations is not self._stream._declarations:
            problem = f"{right!r} is not a keyed stream of {self._stream._declarations!r}; give other.key_by(…)"
            raise ConfigurationError(f"{method} at {location}: {problem}")
        return right._stream._index

    def _join(self, transformation: Join, right: int) -> JoinStream:
        declarations = self._stream._declarations
        declared = DeclaredTransformation(transformation, (self._stream._index, right))
        return JoinStream(declarations, declarations.add(declared))

    def __repr__(self) -> str:
        return f"KeyedStream({self._stream!r}, {', '.join(map(repr, self._keys))})"


class WindowedStream:
    """Rows by key and window; see :meth:`KeyedStream.window`."""

    def __init__(
        self,
        stream: Stream,
        keys: tuple[str, ...],
        window: Window,
        time: str,
        lateness: timedelta,
        emission: Emission,
    ) -> None:
        self._stream = stream
        self._keys = keys
        self._window = window
        self._time = time
        self._lateness = lateness
        self._emission = emission

    def aggregate(
        self,
        uid: str,
        *,
        schema: Mapping[str, str] | None = None,
        parallelism: int | None = None,
        **expressions: pl.Expr | Accumulator | ExpressionAccumulator,
    ) -> ResultStream:
        """One row of results for each key and window: the key, ``window_start``, ``window_end``, then the results.

        Args:
            uid: Name of the operator within the job; the results of open windows are stored under it.
            schema: See :meth:`KeyedStream.aggregate`.
            parallelism: Number of subtasks; the job's when left out.
            expressions: See :meth:`KeyedStream.aggregate`.
        """
        transformation = WindowAggregate(
            Location.of_caller(),
            uid,
            self._keys,
            tuple(expressions.items()),
            schema,
            self._emission,
            window=self._window,
            time=self._time,
            lateness=self._lateness,
            parallelism=parallelism,
        )
        then = self._stream._then(transformation)
        return ResultStream(then._declarations, then._index)

    def __repr__(self) -> str:
        return f"WindowedStream({self._stream!r}, {', '.join(map(repr, self._keys))}, {self._window})"


def _expression(column: str | pl.Expr) -> pl.Expr:
    return pl.col(column) if isinstance(column, str) else column


def _named(name: str, value: pl.Expr) -> pl.Expr:
    # anything but an expression is left as it is: the graph's validation reports it together with all other mistakes
    return value.alias(name) if isinstance(value, pl.Expr) else value


def _column(name: str, value: pl.Expr | RowValue) -> pl.Expr | RowColumn:
    if isinstance(value, pl.Expr):
        return value.alias(name)
    return RowColumn(name, value)


def _emission(emit: Emission | str) -> Emission:
    # anything else is left as it is: the graph's validation reports it together with all other mistakes
    return Emission(emit) if isinstance(emit, str) and emit in list(Emission) else emit  # type: ignore[return-value]


def _join_kind(how: JoinKind | str) -> JoinKind:
    # anything else is left as it is: the graph's validation reports it together with all other mistakes
    return JoinKind(how) if isinstance(how, str) and how in list(JoinKind) else how  # type: ignore[return-value]


def _both(time: tuple[str, str] | str) -> tuple[str, ...]:
    # anything else is left as it is: the graph's validation reports it together with all other mistakes
    return tuple(time) if isinstance(time, tuple | list) else (time, time)
