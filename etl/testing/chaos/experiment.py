"""The crash test itself: two undisturbed runs, then one trial after another, each a killed run and the run after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from etl import errors
from etl.clock import Clock, SystemClock
from etl.errors import ConfigurationError, EtlError, Finding, InternalError
from etl.graph import JobGraph, SinkNode
from etl.guarantee import guarantees_of
from etl.job import Job
from etl.runtime.loader import JobLoader
from etl.sink import Connect, Connection, PreflightContext, ScratchTable, SupportsScratch
from etl.store.database import Database
from etl.testing.chaos.comparison import Difference, compare_rows, compare_tables, count_rows
from etl.testing.chaos.ground import Ground, Place
from etl.testing.chaos.process import Kill, RunOutcome, RunRequest, Step
from etl.testing.chaos.rehearsal import aimed, denser_checkpoints, require_fit
from etl.testing.chaos.report import ChaosReport, NonDeterminism, Trial
from etl.testing.chaos.sample import Sample
from etl.testing.chaos.suspects import suspects
from etl.testing.chaos.zygote import StopRequest, StuckError, Zygote

OCCURRENCES = 3
MINUTES = 10.0
PATIENCE = 10.0
"""A run that takes so many times as long as an undisturbed one is taken for stuck, after a minute at the earliest."""
PATIENCE_MIN_S = 60.0
TELL_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """What is tested, and where.

    Attributes:
        job: The job.
        loader: How the processes of the runs come by it.
        store_url: The store, with a fitting schema.
        database_urls: The databases that its sinks name.
    """

    job: Job
    loader: JobLoader
    store_url: str
    database_urls: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """How it is tested.

    Attributes:
        sample_rows: Read so many rows of each source at most; None reads all.
        occurrences: Kill at so many occurrences of each step: the first ones and the last one.
        minutes: End after this time, whatever is left.
        show_data: Show an example row with each difference.
        steps: Kill at these steps only; empty means all.
    """

    sample_rows: int | None = None
    occurrences: int = OCCURRENCES
    minutes: float = MINUTES
    show_data: bool = False
    steps: tuple[str, ...] = ()


def crash_test(
    plan: ChaosPlan,
    options: ChaosOptions,
    tell: Callable[[str], None] = lambda _line: None,
    stop: StopRequest | None = None,
    clock: Clock | None = None,
) -> ChaosReport:
    """Test a job; nothing of the test is left afterwards.

    Args:
        plan: What.
        options: How.
        tell: Tells the user how far it is, one line.
        stop: The user's request to stop.
        clock: Time.

    Raises:
        ConfigurationError: The job cannot be tested; nothing was run.
        ChaosStoppedError: The user wanted it.
        EtlError: An undisturbed run did not end well.
    """
    graph = plan.job.graph()
    require_fit(plan.job, graph)
    store = Database(plan.store_url, "store")
    databases = {name: Database(url, name) for name, url in plan.database_urls.items()}
    with ExitStack() as stack:
        ground = stack.enter_context(Ground(store, databases, tell))
        # Ends first: what a run still holds or writes could not be removed.
        zygote = stack.enter_context(Zygote(plan.loader.module, stop or StopRequest()))
        return _Experiment(
            plan,
            options,
            graph,
            _Targets(plan.job, graph, store, databases),
            ground,
            zygote,
            tell,
            clock or SystemClock(),
        ).run()


class _Targets:
    """The job's targets: copied for a trial, and compared with those of another."""

    def __init__(self, job: Job, graph: JobGraph, store: Database, databases: Mapping[str, Database]) -> None:
        self._job = job
        self._graph = graph
        self._store = store
        self._databases = databases

    def copy(self, place: Place) -> None:
        """Make the copies.

        Raises:
            ConfigurationError: Some are not there.
        """
        findings: list[Finding] = []
        for node in self._graph.sinks:
            assert isinstance(node.sink, SupportsScratch)
            try:
                node.sink.copy_target(self._context(node), place.scratch)
            except ConfigurationError as error:
                if not error.findings:
                    raise
                findings += error.findings
        if findings:
            raise ConfigurationError.from_findings(f'job "{self._job.name}" cannot be crash-tested', findings)

    def compare(self, expected: Place, found: Place, *, show_data: bool) -> dict[str, Difference]:
        """What each sink's target shows at a place, compared with another place."""
        return {node.uid: self._compare(node, expected, found, show_data) for node in self._graph.sinks}

    def _compare(self, node: SinkNode, expected: Place, found: Place, show_data: bool) -> Difference:
        wanted, there = (self._visible(node, place) for place in (expected, found))
        if isinstance(wanted, ScratchTable) and isinstance(there, ScratchTable):
            connection = self._connect(node)("comparison")
            try:
                columns = self._columns_of(wanted, expected)
                return compare_tables(connection, wanted, there, columns, show_data=show_data)
            finally:
                connection.close()
        assert not isinstance(wanted, ScratchTable)
        assert not isinstance(there, ScratchTable)
        return compare_rows(count_rows(wanted), count_rows(there), node.schema.names, show_data=show_data)

    def _visible(self, node: SinkNode, place: Place) -> ScratchTable | Iterable[object]:
        sink = aimed(node, place.scratch)
        assert isinstance(sink, SupportsScratch)
        return sink.visible_rows(self._context(node))

    def _columns_of(self, table: ScratchTable, place: Place) -> Sequence[str]:
        """What all sinks that write to a table write."""
        names = [
            name for node in self._graph.sinks if self._visible(node, place) == table for name in node.schema.names
        ]
        return list(dict.fromkeys(names))

    def _connect(self, node: SinkNode) -> Connect:
        database = self._store if node.sink.database is None else self._databases[node.sink.database]

        def connect(role: str) -> Connection:
            return database.connect(f"etl-chaos:{role}")

        return connect

    def _context(self, node: SinkNode) -> PreflightContext:
        return PreflightContext(
            uid=node.uid,
            schema=node.schema,
            connect=self._connect(node),
            target_is_store=node.sink.database is None,
            base_dir=self._job.base_dir,
            unit_time_s=self._job.checkpoint.interval_s + self._job.checkpoint.timeout_s,
        )


class _Experiment:
    """One crash test under way."""

    def __init__(
        self,
        plan: ChaosPlan,
        options: ChaosOptions,
        graph: JobGraph,
        targets: _Targets,
        ground: Ground,
        zygote: Zygote,
        tell: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self._plan = plan
        self._options = options
        self._graph = graph
        self._targets = targets
        self._ground = ground
        self._zygote = zygote
        self._tell = tell
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self._deadline_s = self._started_s + options.minutes * 60
        self._patience_s = options.minutes * 60
        self._checkpoint_rows: int | None = None
        self._sample = None if options.sample_rows is None else Sample.of(options.sample_rows)

    def run(self) -> ChaosReport:
        with self._ground.place() as expected:
            first = self._undisturbed(expected, "first")
            if first.rows_read == 0:
                raise ConfigurationError(f'job "{self._plan.job.name}" reads no row: there is nothing to test')
            self._cut_smaller(first)
            with self._ground.place() as repeated:
                started_s = self._clock.monotonic_s()
                second = self._undisturbed(repeated, "second")
                self._patience_s = max(PATIENCE_MIN_S, PATIENCE * (self._clock.monotonic_s() - started_s))
                differences = self._targets.compare(expected, repeated, show_data=self._options.show_data)
            report = ChaosReport(
                job=self._plan.job.name,
                sinks=dict(first.rows_written),
                promises={one.uid: str(one.guarantee) for one in guarantees_of(self._graph, self._plan.job.mode)},
                rows_read=second.rows_read,
                checkpoints=second.checkpoint,
                sample_rows=self._options.sample_rows,
                nondeterminism=self._nondeterminism(first, second, differences),
            )
            if not report.nondeterminism:
                report = self._kill_all(report, expected, self._kills(second.steps))
        return replace(report, duration_s=self._clock.monotonic_s() - self._started_s)

    def _cut_smaller(self, first: RunOutcome) -> None:
        """Have the next runs take several checkpoints, however small the input is."""
        rows = first.rows_read // len(self._graph.sources)
        if self._sample is not None:
            self._sample = self._sample.of_rows(rows)
        self._checkpoint_rows = denser_checkpoints(self._plan.job.checkpoint.rows, rows, first.checkpoint)

    def _kills(self, steps: Sequence[Step]) -> list[Kill]:
        wanted = self._options.steps
        emitted = dict.fromkeys(step.name for step in steps)
        unknown = [name for name in wanted if name not in emitted]
        if unknown:
            raise ConfigurationError(
                f'job "{self._plan.job.name}" takes no step {", ".join(unknown)}; its steps are {", ".join(emitted)}'
            )
        return kills_at([step for step in steps if not wanted or step.name in wanted], self._options.occurrences)

    def _undisturbed(self, place: Place, which: str) -> RunOutcome:
        self._targets.copy(place)
        try:
            outcome = self._run(place, None)
        except StuckError as error:
            raise InternalError(f"the {which} undisturbed run: {error}; use a sample, or more minutes") from None
        if outcome.exit_code != 0:
            raise _error_of(outcome, f"the {which} undisturbed run failed")
        self._tell(f"{which} undisturbed run: {outcome.rows_read:,} rows read, {outcome.checkpoint} checkpoint(s)")
        return outcome

    def _nondeterminism(
        self, first: RunOutcome, second: RunOutcome, differences: Mapping[str, Difference]
    ) -> list[NonDeterminism]:
        found = []
        for uid, difference in differences.items():
            if difference:
                reasons = suspects(self._graph, uid)
                if first.rows_read != second.rows_read:
                    grown = f"the input: {first.rows_read:,} rows were read at first, {second.rows_read:,} then"
                    reasons = (grown, *reasons)
                found.append(NonDeterminism(uid, first.rows_written.get(uid, 0), difference, reasons))
        return found

    def _kill_all(self, report: ChaosReport, expected: Place, kills: Sequence[Kill]) -> ChaosReport:
        self._tell(f"{len(kills)} kills to come, {self._options.minutes:g} minutes at most")
        order = {kill: number for number, kill in enumerate(kills)}
        trials: list[Trial] = []
        waiting = deque(first_ones_first(kills))
        told_s = self._clock.monotonic_s()
        while waiting and self._left_s > 0:
            trial = self._try(expected, waiting[0])
            if trial is None:
                break
            trials.append(trial)
            waiting.popleft()
            if self._clock.monotonic_s() - told_s >= TELL_INTERVAL_S:
                told_s = self._clock.monotonic_s()
                self._tell(f"{len(trials)} of {len(kills)} kills, {sum(map(_is_wrong, trials))} of them not made good")
        trials.sort(key=lambda trial: order[trial.kill])
        return replace(report, trials=tuple(trials), untried=tuple(sorted(waiting, key=lambda kill: order[kill])))

    def _try(self, expected: Place, kill: Kill) -> Trial | None:
        """None when the time was over before the trial was."""
        with self._ground.place() as place:
            self._targets.copy(place)
            try:
                outcome = self._run(place, kill)
                reached = outcome.killed
                if reached:
                    outcome = self._run(place, None)
            except StuckError as error:
                return Trial(kill, reached=True, failure=str(error)) if self._left_s > 0 else None
            failure = "" if outcome.exit_code == 0 else f"exit code {outcome.exit_code}: {outcome.error}"
            differences = self._targets.compare(expected, place, show_data=self._options.show_data)
        return Trial(kill, reached, failure, differences)

    @property
    def _left_s(self) -> float:
        return self._deadline_s - self._clock.monotonic_s()

    def _run(self, place: Place, kill: Kill | None) -> RunOutcome:
        request = RunRequest(
            loader=self._plan.loader,
            job_name=place.job_name,
            schema=place.scratch.schema,
            directory=str(place.scratch.directory),
            store_url=self._plan.store_url,
            database_urls=self._plan.database_urls,
            sample=self._sample,
            checkpoint_rows=self._checkpoint_rows,
            kill=kill,
        )
        return self._zygote.run(request, max(0.0, min(self._patience_s, self._left_s)))


def kills_at(steps: Sequence[Step], occurrences: int) -> list[Kill]:
    """Where to kill: at the first occurrences of each step and at its last one, in the order of the steps."""
    by_step: dict[str, list[Kill]] = {}
    for step in steps:
        first = range(1, min(step.count, max(1, occurrences - 1)) + 1)
        numbers = sorted({*first, step.count} if occurrences > 1 else first)
        by_step.setdefault(step.name, []).extend(Kill(step.name, step.uid, number) for number in numbers)
    return [kill for kills in by_step.values() for kill in kills]


def first_ones_first(kills: Sequence[Kill]) -> list[Kill]:
    """The first occurrence of every step before the second of any: what there is no time for then hurts least."""
    return sorted(kills, key=lambda kill: kill.occurrence)


def _is_wrong(trial: Trial) -> bool:
    return bool(trial.failure) or any(trial.differences.values())


def _error_of(outcome: RunOutcome, what: str) -> EtlError:
    """The error of another process, as one of the same class."""
    kind = getattr(errors, outcome.error_class, InternalError)
    assert issubclass(kind, EtlError)
    return kind(f"{what}: {outcome.error}")
