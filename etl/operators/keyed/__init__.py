"""Operators that keep state by key: values by dense number of the key, in columns that grow.

A :class:`~etl.operators.keyed.key_index.KeyIndex` numbers the keys it has seen, 0, 1, 2 …; a
:class:`~etl.operators.keyed.columns.StateColumn` holds one value for each number. So a batch is worked off in time
that depends on the batch and not on how many keys there are. Both together are a
:class:`~etl.operators.keyed.table.KeyedTable`; what an operator stores is one of them, or several
(:class:`~etl.operators.keyed.state.KeyedTables`), such as rows that wait for event time
(:class:`~etl.operators.keyed.row_buffer.RowBuffer`).
"""
