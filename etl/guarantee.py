"""What a job promises from end to end, sink by sink, with the reasons.

A promise is as strong as its weakest link, and the links are: can the sources be read again, which checkpoint mode is
set, do the functions on the way yield the same again, and how do the sink's rows become visible. The table that every
text on stream processing shows (source x sink) is computed here from the same rules (:func:`classic_table`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from etl.graph import JobGraph, Node, OperatorNode, SinkNode, SourceNode, TransformationNode, inputs_of
from etl.joins import Join
from etl.keyed import Aggregate
from etl.sink import CheckpointMode, Delivery
from etl.transformation import Rebalance
from etl.windowed import WindowAggregate


class Guarantee(StrEnum):
    """How often a record that was read takes effect in the target, whatever fails in between."""

    AT_MOST_ONCE = "at-most-once"
    """Records may be lost."""
    AT_LEAST_ONCE = "at-least-once"
    """No record is lost, some may be there twice."""
    EFFECTIVELY_ONCE = "exactly-once in the end"
    """The end state is exact, but readers may see values go back while a failure is replayed."""
    EXACTLY_ONCE = "exactly-once"
    """Each record takes effect once, and readers never see anything else."""

    @property
    def strength(self) -> int:
        """Position in the order from the weakest (0) to the strongest."""
        return list(Guarantee).index(self)


@dataclass(frozen=True, slots=True)
class Link:
    """One link of the chain and what it allows at best."""

    guarantee: Guarantee
    reason: str


@dataclass(frozen=True, slots=True)
class SinkGuarantee:
    """What holds for one sink.

    Attributes:
        uid: The sink.
        guarantee: The weakest of all links.
        reasons: One for each link, the weakest first.
    """

    uid: str
    guarantee: Guarantee
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClassicRow:
    """A line of the source x sink table."""

    source: str
    sink: str
    guarantee: Guarantee
    reason: str


def guarantee_of(graph: JobGraph, mode: CheckpointMode, sink: SinkNode) -> SinkGuarantee:
    """The end-to-end guarantee of one sink of a validated job."""
    steps = [*_function_links(graph, sink), *_state_links(graph, sink)]
    links = [*_source_links(graph, sink), _mode_link(mode), *steps, _delivery_of(sink)]
    # the sort is stable: among equals the order of the data's way stays
    ordered = sorted(links, key=lambda link: link.guarantee.strength)
    return SinkGuarantee(sink.uid, ordered[0].guarantee, tuple(link.reason for link in ordered))


def guarantees_of(graph: JobGraph, mode: CheckpointMode) -> tuple[SinkGuarantee, ...]:
    """The guarantees of all sinks, in the order of declaration."""
    return tuple(guarantee_of(graph, mode, sink) for sink in graph.sinks)


def classic_table() -> tuple[ClassicRow, ...]:
    """The source x sink table, in exactly-once mode, as the rules of this module yield it."""
    # whatever the sink, so the strongest one stands for all
    one_time = _classic("any sink", Delivery.TRANSACTIONAL, is_replayable=False)
    replayable = (
        _classic(name, delivery, is_replayable=True, is_monotone=is_monotone)
        for name, delivery, is_monotone in _CLASSIC_SINKS
    )
    return (one_time, *replayable)


def classic_markdown() -> str:
    """The source x sink table as Markdown."""
    lines = ["| source | sink | guarantee | because |", "|---|---|---|---|"]
    lines += [f"| {row.source} | {row.sink} | **{row.guarantee}** | {row.reason} |" for row in classic_table()]
    return "\n".join(lines) + "\n"


_CLASSIC_SINKS = (
    ("any sink that writes at once", Delivery.DIRECT, False),
    ("idempotent (upsert by key)", Delivery.IDEMPOTENT, False),
    ("idempotent (upsert by key) with a version guard", Delivery.IDEMPOTENT, True),
    ("write-ahead log, target without transactions", Delivery.WRITE_AHEAD_AT_LEAST_ONCE, False),
    ("write-ahead log, rows and ledger in one transaction", Delivery.WRITE_AHEAD, False),
    ("two-phase commit", Delivery.TWO_PHASE, False),
    ("one transaction with the positions", Delivery.TRANSACTIONAL, False),
)


def _classic(sink: str, delivery: Delivery, *, is_replayable: bool, is_monotone: bool = False) -> ClassicRow:
    # min takes the first of equals: where nothing weakens the promise, the sink's own reason is the interesting one
    links = (delivery_link(delivery, is_monotone=is_monotone), source_link(is_replayable=is_replayable))
    weakest = min(links, key=lambda link: link.guarantee.strength)
    return ClassicRow("replayable" if is_replayable else "cannot be replayed", sink, weakest.guarantee, weakest.reason)


def source_link(*, is_replayable: bool) -> Link:
    """What a source allows."""
    if is_replayable:
        return Link(Guarantee.EXACTLY_ONCE, "the source is read again from the position of the last checkpoint")
    return Link(Guarantee.AT_MOST_ONCE, "the source cannot be read again: what was read before a failure is lost")


def delivery_link(delivery: Delivery, *, is_monotone: bool = False) -> Link:
    """What a way of delivery allows.

    Args:
        delivery: How rows become visible.
        is_monotone: For idempotent sinks: a version guard keeps values from going back.
    """
    match delivery:
        case Delivery.TRANSACTIONAL:
            return Link(Guarantee.EXACTLY_ONCE, "rows and positions commit in one transaction")
        case Delivery.TWO_PHASE:
            reason = (
                "rows are prepared before the checkpoint completes, outlive crashes and are committed only after it"
            )
            return Link(Guarantee.EXACTLY_ONCE, reason)
        case Delivery.WRITE_AHEAD:
            reason = "rows are logged with the checkpoint, then written with their ledger entry in one transaction"
            return Link(Guarantee.EXACTLY_ONCE, reason)
        case Delivery.WRITE_AHEAD_AT_LEAST_ONCE:
            reason = "writing and confirming are two steps: after a crash between them rows are written again"
            return Link(Guarantee.AT_LEAST_ONCE, reason)
        case Delivery.IDEMPOTENT if is_monotone:
            reason = "rows that come again overwrite themselves, and the version guard never lets a row go back"
            return Link(Guarantee.EXACTLY_ONCE, reason)
        case Delivery.IDEMPOTENT:
            reason = "rows that come again overwrite themselves, but may show older values during a replay"
            return Link(Guarantee.EFFECTIVELY_ONCE, reason)
        case Delivery.DIRECT:
            reason = "rows are visible at once: after a failure those since the last checkpoint are written again"
            return Link(Guarantee.AT_LEAST_ONCE, reason)
        case _:
            assert_never(delivery)


def _mode_link(mode: CheckpointMode) -> Link:
    match mode:
        case CheckpointMode.EXACTLY_ONCE:
            return Link(Guarantee.EXACTLY_ONCE, "checkpoints are aligned (mode exactly-once)")
        case CheckpointMode.AT_LEAST_ONCE:
            reason = "checkpoints are not aligned (mode at-least-once): rows behind a barrier may come twice"
            return Link(Guarantee.AT_LEAST_ONCE, reason)
        case CheckpointMode.AT_MOST_ONCE:
            reason = "positions are stored before the rows (mode at-most-once): a failure loses the rows between"
            return Link(Guarantee.AT_MOST_ONCE, reason)
        case _:
            assert_never(mode)


def _source_links(graph: JobGraph, sink: SinkNode) -> Iterable[Link]:
    for node in graph.upstream(sink.id):
        if isinstance(node, SourceNode):
            link = source_link(is_replayable=node.source.replayable)
            yield Link(link.guarantee, f'source "{node.uid}": {link.reason}')


def _function_links(graph: JobGraph, sink: SinkNode) -> Iterable[Link]:
    """A function that yields something else on a replay is harmless where nothing of the failed attempt is visible."""
    for name in _non_deterministic(graph, sink):
        yield _unrepeatable_link(f"{name} is not deterministic", sink)


def _unrepeatable_link(problem: str, sink: SinkNode) -> Link:
    if sink.sink.delivery in (Delivery.DIRECT, Delivery.IDEMPOTENT):
        reason = f"{problem}: a replay may leave other rows beside those already visible"
        return Link(Guarantee.AT_LEAST_ONCE, reason)
    return Link(Guarantee.EXACTLY_ONCE, f"{problem}, but nothing of a failed attempt ever becomes visible")


def _non_deterministic(graph: JobGraph, sink: SinkNode) -> Sequence[str]:
    nodes = (node for node in graph.upstream(sink.id) if isinstance(node, TransformationNode))
    return [f'"{node.id}"' for node in nodes if not node.transformation.deterministic]


def _state_links(graph: JobGraph, sink: SinkNode) -> Iterable[Link]:
    """What is remembered is part of the checkpoint; only rows that were visible before it can differ on a replay."""
    nodes = [node for node in graph.upstream(sink.id) if isinstance(node, OperatorNode)]
    for node in nodes:
        yield Link(Guarantee.EXACTLY_ONCE, f'"{node.uid}": its state is stored with the positions')
        if node.transformation.emits_again and node in graph.made_of(sink.id):
            reason = (
                f'"{node.uid}" emits a row again whenever it has changed: write it by'
                f" {', '.join(node.transformation.result_keys)}, or what stays depends on when checkpoints are taken"
            )
            yield Link(Guarantee.EXACTLY_ONCE, reason)
        if node.transformation.unrepeatable is not None:
            yield _unrepeatable_link(f'"{node.uid}" {node.transformation.unrepeatable}', sink)
        if sink.sink.delivery in (Delivery.DIRECT, Delivery.IDEMPOTENT) and _depends_on_arrival(graph, node):
            reason = (
                f'"{node.uid}" depends on the order in which rows of several inputs arrive: a replay may leave other'
                " rows beside those already visible"
            )
            yield Link(Guarantee.AT_LEAST_ONCE, reason)


def _depends_on_arrival(graph: JobGraph, node: OperatorNode) -> bool:
    """Whether it lets the first row of a key pass, or judges each row by those before, and chance decides the order.

    An aggregation is not among them, unless rows may come late for it: it emits a key again and again, and the last
    row of it is what stays. A join is: whether a row that breaks its promise is late depends on which input is ahead.
    """
    if isinstance(node.transformation, Join):
        return True
    if isinstance(node.transformation, Aggregate) and not isinstance(node.transformation, WindowAggregate):
        return False
    before = [one for one in graph.upstream(node.id) if one.id != node.id]
    exchanged = [one for one in before if isinstance(one, OperatorNode)]
    return any(_is_out_of_order(one) for one in before) or any(
        one.transformation.keys != node.transformation.keys for one in exchanged
    )


def _is_out_of_order(node: Node) -> bool:
    """Whether chance decides in which order its rows come."""
    match node:
        case SourceNode():
            return node.parallelism > 1
        case TransformationNode(transformation=Rebalance()):
            return True
        case _:
            return len(inputs_of(node)) > 1


def _delivery_of(sink: SinkNode) -> Link:
    link = delivery_link(sink.sink.delivery, is_monotone=sink.sink.monotone)
    return Link(link.guarantee, f'sink "{sink.uid}": {link.reason}')
