"""Sinks: what a job writes to. The engine's first customer; everything here uses only its public contracts.

=====================  ====================================  =====================================================
sink                   rows become visible                   guarantee, with a replayable source
=====================  ====================================  =====================================================
TransactionalSink      in the checkpoint's own transaction   exactly-once; the table lives in the store database
TwoPhaseCommitSink     prepared, committed after it          exactly-once; needs prepared transactions
WriteAheadSink         written after it, from the store      exactly-once; any PostgreSQL
UpsertSink             at each checkpoint, by key            exactly-once in the end; idempotent
ParquetFiles           renamed after it                      exactly-once
=====================  ====================================  =====================================================

:class:`PostgresLookup` is no sink: it is asked for rows by key while a job runs.

For a target of your own derive from :class:`TwoPhaseCommitSinkBase` when it can prepare something and finish it later,
else from :class:`WriteAheadSinkBase`, and prove it with the suites in :mod:`etl.testing.sink_contract`.
"""

from sinks.parquet_files import ParquetFiles
from sinks.postgres_lookup import PostgresLookup
from sinks.postgres_table import PostgresTable
from sinks.postgres_two_phase import TwoPhaseCommitSink
from sinks.postgres_write_ahead import WriteAheadSink
from sinks.transactional import TransactionalSink
from sinks.two_phase import PreparedUnits, TwoPhaseCommitSinkBase, UnitId, UnitStager
from sinks.upsert import UpsertSink
from sinks.write_ahead import UnitDelivery, WriteAheadSinkBase

__all__ = [
    "ParquetFiles",
    "PostgresLookup",
    "PostgresTable",
    "PreparedUnits",
    "TransactionalSink",
    "TwoPhaseCommitSink",
    "TwoPhaseCommitSinkBase",
    "UnitDelivery",
    "UnitId",
    "UnitStager",
    "UpsertSink",
    "WriteAheadSink",
    "WriteAheadSinkBase",
]
