"""The graph of a job: sources, transformations and sinks with the schema of every edge.

:func:`build_graph` turns what was declared into a :class:`JobGraph` and a list of everything that is wrong with it;
nothing is opened or read on the way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from etl.errors import ConfigurationError, Finding
from etl.event_time import EventTime
from etl.joins import Join, LookupJoin
from etl.keyed import Aggregate, Deduplicate, Stateful
from etl.schema import Schema
from etl.sink import Sink
from etl.source import Source
from etl.transformation import PARALLELISM_MAX, Location, SideStream, Transformation, Union, is_parallelism

SNAPSHOT_UID = "etl-snapshots"
"""Name of the subtask that encodes state."""

_SUBTASK = re.compile(r"\[[0-9]+\]$")
"""How the names of parallel subtasks end."""


@dataclass(frozen=True, slots=True)
class SourceNode:
    """Where rows enter; ``id`` equals ``uid``, and so many subtasks read it as ``parallelism`` says."""

    id: str
    uid: str
    source: Source
    schema: Schema
    location: Location
    event_time: EventTime | None = None
    parallelism: int = 1


@dataclass(frozen=True, slots=True)
class TransformationNode:
    """What happens to rows; ``inputs`` are node ids, ``schema`` is what it yields.

    Ids look like ``filter-1``; that of a stateful transformation is its uid.
    """

    id: str
    transformation: Transformation
    inputs: tuple[str, ...]
    schema: Schema

    @property
    def location(self) -> Location:
        """Where the user declared it."""
        return self.transformation.location


@dataclass(frozen=True, slots=True)
class OperatorNode(TransformationNode):
    """A transformation that keeps state under its uid."""

    transformation: Stateful

    @property
    def uid(self) -> str:
        """Names the state."""
        return self.transformation.uid


@dataclass(frozen=True, slots=True)
class SinkNode:
    """Where rows leave; ``id`` equals ``uid``, ``input`` is a node id, ``schema`` is what the sink is given."""

    id: str
    uid: str
    sink: Sink
    input: str
    schema: Schema
    location: Location


Node = SourceNode | TransformationNode | SinkNode


@dataclass(frozen=True, slots=True)
class JobGraph:
    """A validated job.

    Attributes:
        nodes: Every node after all of its inputs, in the order of declaration.
    """

    nodes: tuple[Node, ...]

    @property
    def sources(self) -> tuple[SourceNode, ...]:
        """Sources in the order of declaration."""
        return tuple(node for node in self.nodes if isinstance(node, SourceNode))

    @property
    def sinks(self) -> tuple[SinkNode, ...]:
        """Sinks in the order of declaration."""
        return tuple(node for node in self.nodes if isinstance(node, SinkNode))

    @property
    def operators(self) -> tuple[OperatorNode, ...]:
        """Transformations that keep state, in the order of declaration."""
        return tuple(node for node in self.nodes if isinstance(node, OperatorNode))

    @property
    def lookups(self) -> tuple[LookupJoin, ...]:
        """Lookups in the order of declaration."""
        found = (node.transformation for node in self.nodes if isinstance(node, TransformationNode))
        return tuple(one for one in found if isinstance(one, LookupJoin))

    def node(self, node_id: str) -> Node:
        """The node with this id.

        Raises:
            KeyError: There is none.
        """
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise KeyError(node_id)

    def consumers(self, node_id: str) -> tuple[str, ...]:
        """Ids of the nodes that read this one, in the order of declaration."""
        return tuple(node.id for node in self.nodes if node_id in inputs_of(node))

    def upstream(self, node_id: str) -> tuple[Node, ...]:
        """The node and everything that its rows come from, in the order of :attr:`nodes`."""
        wanted = {node_id}
        for node in reversed(self.nodes):
            if node.id in wanted:
                wanted.update(inputs_of(node))
        return tuple(node for node in self.nodes if node.id in wanted)

    def made_of(self, node_id: str) -> tuple[Node, ...]:
        """Like :meth:`upstream`, but an operator by whose side rows have passed is not among what they are made of."""
        wanted = {node_id}
        for node in reversed(self.nodes):
            if node.id in wanted:
                passed = isinstance(node, TransformationNode) and isinstance(node.transformation, SideStream)
                wanted.update(inputs_of(self.node(inputs_of(node)[0])) if passed else inputs_of(node))
        return tuple(node for node in self.nodes if node.id in wanted)


def inputs_of(node: Node) -> tuple[str, ...]:
    """Ids of the nodes whose rows a node reads."""
    match node:
        case SourceNode():
            return ()
        case TransformationNode():
            return node.inputs
        case SinkNode():
            return (node.input,)


@dataclass(frozen=True, slots=True)
class DeclaredSource:
    """A call of ``job.read``."""

    uid: str
    source: Source
    location: Location
    event_time: EventTime | None = None
    parallelism: int = 1


@dataclass(frozen=True, slots=True)
class DeclaredTransformation:
    """A call of a stream's method; ``inputs`` are indexes of earlier declarations."""

    transformation: Transformation
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeclaredSink:
    """A call of ``stream.write``; ``input`` is the index of an earlier declaration."""

    uid: str
    sink: Sink
    input: int
    location: Location


Declaration = DeclaredSource | DeclaredTransformation | DeclaredSink


def build_graph(declarations: Sequence[Declaration]) -> tuple[JobGraph, list[Finding]]:
    """Validate declarations; the graph is complete if and only if there are no findings.

    Args:
        declarations: In the order in which they were made, so inputs come before their consumers.
    """
    builder = _Builder(declarations)
    return builder.build(), builder.findings


class _Builder:
    """Goes through the declarations once; what depends on something broken is left out without a further finding."""

    def __init__(self, declarations: Sequence[Declaration]) -> None:
        self.findings: list[Finding] = []
        self._declarations = declarations
        self._built: dict[int, Node] = {}
        self._taken = {uid for _, uid, _ in named(declarations) if isinstance(uid, str)}
        self._counts: dict[str, int] = {}

    def build(self) -> JobGraph:
        self._check_uids()
        for index, declaration in enumerate(self._declarations):
            node = self._node(declaration)
            if node is not None:
                self._built[index] = node
        self._check_ends()
        self._check_dangling()
        self._check_exclusive_targets()
        return JobGraph(tuple(self._built.values()))

    def _node(self, declaration: Declaration) -> Node | None:
        match declaration:
            case DeclaredSource():
                return self._source(declaration)
            case DeclaredTransformation():
                return self._transformation(declaration)
            case DeclaredSink():
                return self._sink(declaration)

    def _source(self, declared: DeclaredSource) -> SourceNode | None:
        if not _is_a(declared.source, Source):
            self._not_a(declared.uid, declared.location, declared.source, "source", 'e.g. CsvFiles("data/*.csv", …)')
            return None
        try:
            schema = declared.source.schema
        except ConfigurationError as error:
            self._adopt(f'source "{declared.uid}"', error)
            return None
        subject, event_time = f'source "{declared.uid}" at {declared.location}', declared.event_time
        if event_time is not None and not _is_a(event_time, EventTime):
            problem = f"event_time is {type(event_time).__name__}"
            self.findings.append(Finding(subject, problem, 'give EventTime("…", out_of_orderness=timedelta(…))'))
        elif event_time is not None:
            self.findings += event_time.findings(subject, schema)
        self.findings += _parallelism_findings(subject, declared)
        return SourceNode(
            declared.uid, declared.uid, declared.source, schema, declared.location, event_time, declared.parallelism
        )

    def _transformation(self, declared: DeclaredTransformation) -> TransformationNode | None:
        transformation = declared.transformation
        if isinstance(transformation, Stateful | LookupJoin):
            node_id = transformation.uid
        else:
            node_id = self._fresh_id(transformation.kind)
        inputs = [self._built[index] for index in declared.inputs if index in self._built]
        if len(inputs) < len(declared.inputs):
            return None
        if isinstance(transformation, SideStream):
            return self._side_stream(transformation, inputs[0])
        if isinstance(transformation, Union) and len(set(declared.inputs)) < len(inputs):
            cure = "unite different streams; flat_map can yield a row twice"
            self.findings.append(transformation.finding("a stream is united with itself", cure))
            return None
        try:
            schema = transformation.output_schema([node.schema for node in inputs])
        except ConfigurationError as error:
            self._adopt(str(transformation), error)
            return None
        origins = tuple(node.id for node in inputs)
        if isinstance(transformation, Stateful):
            node = OperatorNode(node_id, transformation, origins, schema)
            return node if self._aggregates_events(node) and self._knows_event_time(node) else None
        return TransformationNode(node_id, transformation, origins, schema)

    def _side_stream(self, transformation: SideStream, operator: Node) -> TransformationNode | None:
        assert isinstance(operator, OperatorNode)
        try:
            inputs = [self._node_of(node_id).schema for node_id in operator.inputs]
            schema = operator.transformation.side_schema(transformation.tag, inputs)
        except ConfigurationError as error:
            self._adopt(str(transformation), error)
            return None
        return TransformationNode(self._fresh_id(transformation.tag), transformation, (operator.id,), schema)

    def _node_of(self, node_id: str) -> Node:
        return next(node for node in self._built.values() if node.id == node_id)

    def _knows_event_time(self, node: OperatorNode) -> bool:
        """Whether event time ever comes to an operator that waits for it."""
        if not node.transformation.event_time_columns:
            return True
        findings = list(node.transformation.event_time_findings([self._node_of(one).schema for one in node.inputs]))
        graph = JobGraph((*self._built.values(), node))
        for one in graph.upstream(node.id):
            if isinstance(one, SourceNode) and one.event_time is None:
                problem = f'its rows come from source "{one.uid}", which does not say when they happened'
                cure = f'add event_time=EventTime("…") to job.read("{one.uid}", …) at {one.location}'
                findings.append(node.transformation.finding(problem, cure))
        self.findings += findings
        return not findings

    def _aggregates_events(self, node: OperatorNode) -> bool:
        """Results are emitted again whenever they change: who takes each of them, goes by checkpoints."""
        if not isinstance(node.transformation, Aggregate | Deduplicate | Join):
            return True
        graph = JobGraph(tuple(self._built.values()))
        before = [one for input_id in node.inputs for one in graph.made_of(input_id)]
        results = [one for one in before if isinstance(one, OperatorNode) and one.transformation.emits_again]
        for one in results:
            problem = f'it would take each of the results of "{one.uid}" again whenever it changes'
            cure = "use the rows that those results are made of, or look at results with process(…)"
            self.findings.append(node.transformation.finding(problem, cure))
        return not results

    def _sink(self, declared: DeclaredSink) -> SinkNode | None:
        if not _is_a(declared.sink, Sink):
            cure = 'e.g. TwoPhaseCommitSink(PostgresTable("…"))'
            self._not_a(declared.uid, declared.location, declared.sink, "sink", cure)
            return None
        source = self._built.get(declared.input)
        if source is None:
            return None
        return SinkNode(declared.uid, declared.uid, declared.sink, source.id, source.schema, declared.location)

    def _fresh_id(self, kind: str) -> str:
        """``filter-1``, ``filter-2`` …, skipping whatever a user chose as a uid."""
        while True:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            node_id = f"{kind}-{self._counts[kind]}"
            if node_id not in self._taken:
                return node_id

    def _not_a(self, uid: str, location: Location, what: object, role: str, cure: str) -> None:
        problem = f"{type(what).__name__} is not a {role}"
        self.findings.append(Finding(f'{role} "{uid}" at {location}', problem, f"give a {role}, {cure}"))

    def _adopt(self, subject: str, error: ConfigurationError) -> None:
        own = [Finding(subject, str(error), "correct the declaration")]
        self.findings += error.findings or own

    def _check_uids(self) -> None:
        first: dict[str, Location] = {}
        for role, uid, location in named(self._declarations):
            subject = f'{role} "{uid}" at {location}' if uid else f"{role} at {location}"
            problem = _uid_problem(uid)
            if problem is not None:
                self.findings.append(Finding(subject, problem, f"give the {role} a name of its own"))
            elif uid in first:
                problem = f'the uid "{uid}" is already used at {first[uid]}'
                self.findings.append(Finding(subject, problem, "positions and state belong to the uid: choose another"))
            else:
                first[uid] = location

    def _check_ends(self) -> None:
        if not any(isinstance(item, DeclaredSource) for item in self._declarations):
            self.findings.append(Finding("job", "it reads nothing", 'add job.read("…", source)'))
        if not any(isinstance(item, DeclaredSink) for item in self._declarations):
            self.findings.append(Finding("job", "it writes nothing", 'add stream.write("…", sink)'))

    def _check_dangling(self) -> None:
        used: set[int] = set()
        for declaration in self._declarations:
            if isinstance(declaration, DeclaredTransformation):
                used.update(declaration.inputs)
            elif isinstance(declaration, DeclaredSink):
                used.add(declaration.input)
        for index, declaration in enumerate(self._declarations):
            if index not in used and not isinstance(declaration, DeclaredSink):
                self.findings.append(
                    Finding(_subject(declaration), "its rows are never written", "write the stream or remove it")
                )

    def _check_exclusive_targets(self) -> None:
        first: dict[tuple[str | None, str], SinkNode] = {}
        for node in self._built.values():
            if not isinstance(node, SinkNode) or node.sink.exclusive_target is None:
                continue
            target = (node.sink.database, node.sink.exclusive_target)
            other = first.setdefault(target, node)
            if other is not node:
                problem = f'sink "{other.uid}" at {other.location} writes to {target[1]} as well'
                cure = "write both streams through one union"
                self.findings.append(Finding(f'sink "{node.uid}" at {node.location}', problem, cure))


def _parallelism_findings(subject: str, declared: DeclaredSource) -> Iterable[Finding]:
    if not is_parallelism(declared.parallelism):
        problem = f"parallelism {declared.parallelism!r} is not 1 to {PARALLELISM_MAX}"
        yield Finding(subject, problem, "choose another number")
    elif declared.parallelism > 1 and getattr(declared.event_time, "in_sequence", False):
        problem = f"its splits follow one another in time, and {declared.parallelism} subtasks would read them at once"
        yield Finding(subject, problem, "read it with parallelism=1, or leave in_sequence out")


def named(declarations: Sequence[Declaration]) -> Iterable[tuple[str, str, Location]]:
    """Role, uid and place of everything whose positions, state or commits are stored."""
    for declaration in declarations:
        match declaration:
            case DeclaredTransformation(transformation=Stateful() | LookupJoin() as named):
                yield named.kind, named.uid, named.location
            case DeclaredSource():
                yield "source", declaration.uid, declaration.location
            case DeclaredSink():
                yield "sink", declaration.uid, declaration.location


def _is_a(what: object, kind: type) -> bool:
    """An ``isinstance`` that does not trust annotations: users get them wrong."""
    return isinstance(what, kind)


def _subject(declaration: DeclaredSource | DeclaredTransformation) -> str:
    if isinstance(declaration, DeclaredSource):
        return f'source "{declaration.uid}" at {declaration.location}'
    return str(declaration.transformation)


def _uid_problem(uid: object) -> str | None:
    if uid is None or uid == "":
        return "it has no uid"
    if not isinstance(uid, str):
        return f"the uid is of type {type(uid).__name__}, not text"
    if not uid.strip() or uid != uid.strip():
        return "the uid is blank or has spaces around it"
    if not uid.isprintable() or len(uid) > 200:
        return "the uid has control characters or more than 200 characters"
    if uid == SNAPSHOT_UID or _SUBTASK.search(uid):
        return "the uid is like the name of a subtask"
    return None
