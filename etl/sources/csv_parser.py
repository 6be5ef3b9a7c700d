"""Turn a block of whole records into a record batch: by Arrow's CSV reader, and by the rules where that gives up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv

from etl.schema import Schema
from etl.sources.csv_blocks import RECORD_BYTES_MAX, is_well_formed
from etl.sources.csv_columns import FALSE_TEXTS, TRUE_TEXTS, Column, ColumnBlock
from etl.sources.csv_invalid import InvalidValueError
from etl.sources.local_time import LocalTimes

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ARROW_BLOCK_BYTES = 1 << 30
assert _ARROW_BLOCK_BYTES > 4 * RECORD_BYTES_MAX


class UnreadableBlockError(Exception):
    """Something in the block is refused; the diagnosis says what and where."""


@dataclass(frozen=True, slots=True)
class ParsedBlock:
    """The rows of a block, and how many line ends it has."""

    rows: pa.RecordBatch
    lines: int


@dataclass(frozen=True, slots=True)
class CsvRules:
    """What a table's files look like, the same for all of them.

    Attributes:
        schema: The declared columns.
        nulls: Unquoted fields that mean NULL.
        zone: Zone of ``timestamptz`` values that name none.
    """

    schema: Schema
    nulls: tuple[str, ...]
    zone: LocalTimes | None

    @property
    def blank_is_record(self) -> bool:
        """Whether an empty line is a record with one empty field, as it is where a table has one column."""
        return len(self.schema) == 1

    def columns(self) -> tuple[Column, ...]:
        """How each column is read, in declared order."""
        return tuple(Column.of(field, self.zone) for field in self.schema)


class CsvParser:
    """Parses the blocks of one file; not thread-safe."""

    def __init__(self, rules: CsvRules, header: Sequence[str]) -> None:
        self._rules = rules
        self._header = list(header)
        self._columns = rules.columns()
        self._schema = rules.schema.to_arrow()
        self._native = self._convert_options({column.field.name: column.read_as for column in self._columns})
        self._near_x = self._convert_options({column.field.name: column.read_near_x for column in self._columns})
        self._count_lines = False

    def parse(self, block: bytes) -> ParsedBlock:
        """Parse a block of whole records that ends with a line end.

        Raises:
            UnreadableBlockError: Some record or value is refused.
        """
        if not is_well_formed(block):
            raise UnreadableBlockError
        near_x = b"x" in block or b"X" in block
        table, lines = self._read_all(block, self._near_x if near_x else self._native)
        arrays = [self._finish(column, table, block, near_x=near_x) for column in self._columns]
        rows = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        return ParsedBlock(rows, rows.num_rows if lines is None else lines)

    def _read_all(self, block: bytes, convert: Any) -> tuple[Any, int | None]:
        """The table (None where Arrow refuses a value) and the number of line ends (None: as many as rows)."""
        if not self._count_lines and b'"' not in block:
            table = self._read_uncounted(block, convert)
            if table is not None:
                return table, None
            self._count_lines = True
        lines = block.count(b"\n")
        try:
            return self._read(block, convert, skip_blank=not self._rules.blank_is_record), lines
        except pa.ArrowInvalid:
            return None, lines

    def _read_uncounted(self, block: bytes, convert: Any) -> Any:
        """Read a block without quotes in which each line is a row, or None where that is not certain.

        It saves the counting of line ends, which costs an eighth of the parsing.
        """
        try:
            table = self._read(block, convert, skip_blank=False)
        except pa.ArrowInvalid:
            return None
        if self._rules.blank_is_record:
            return table
        # Arrow makes a row of empty fields of a blank line: all NULL where the empty field is NULL, and nothing
        # but text where it is not.
        if "" in self._rules.nulls:
            certain = any(column.null_count == 0 for column in table.itercolumns())
        else:
            certain = any(not pa.types.is_string(column.type) for column in table.itercolumns())
        return table if certain else None

    def _finish(self, column: Column, table: Any, block: bytes, *, near_x: bool) -> Any:
        """One column in its final type: at once where that is safe, else value by value."""
        name = column.field.name

        def reread(as_type: pa.DataType) -> Any:
            return self._read_column(block, name, as_type)

        wanted = column.read_near_x if near_x else column.read_as
        values = reread(wanted) if table is None else _one_array(table.column(name))
        checked = None if values is None else column.check(ColumnBlock(values, reread))
        if checked is not None:
            return checked
        text = reread(pa.string())
        if text is None:
            raise UnreadableBlockError
        try:
            return column.convert_all(text)
        except InvalidValueError as error:
            raise UnreadableBlockError from error

    def _read_column(self, block: bytes, name: str, as_type: pa.DataType) -> Any:
        convert = self._convert_options({name: as_type})
        try:
            return _one_array(self._read(block, convert, skip_blank=not self._rules.blank_is_record).column(name))
        except pa.ArrowInvalid:
            return None

    def _convert_options(self, types: Mapping[str, pa.DataType]) -> Any:
        return pacsv.ConvertOptions(
            column_types=dict(types),
            include_columns=list(types),
            null_values=list(self._rules.nulls),
            true_values=TRUE_TEXTS,
            false_values=FALSE_TEXTS,
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )

    def _read(self, block: bytes, convert: Any, *, skip_blank: bool) -> Any:
        # Arrow takes a byte order mark at the start of what it is given for the file's, wherever the block stands.
        guarded = block.startswith(BYTE_ORDER_MARK)
        return pacsv.read_csv(
            pa.BufferReader(b"\n" + block if guarded else block),
            read_options=pacsv.ReadOptions(
                column_names=self._header,
                use_threads=False,
                block_size=_ARROW_BLOCK_BYTES,
                skip_rows=1 if guarded else 0,
            ),
            parse_options=pacsv.ParseOptions(ignore_empty_lines=skip_blank),
            convert_options=convert,
        )


def _one_array(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
