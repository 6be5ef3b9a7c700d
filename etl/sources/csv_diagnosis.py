"""Find the first thing that is wrong in a block, and say where, what, why and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etl.errors import InternalError, RecordError
from etl.sources.csv_columns import Column
from etl.sources.csv_invalid import InvalidValueError
from etl.sources.csv_parser import CsvRules
from etl.sources.csv_records import RawField, RawRecord, StructureError, iter_records

_VALUE_CHARACTERS_MAX = 80


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a block stands.

    Attributes:
        uid: The source's uid.
        split: The file's name.
        offset: Byte of the file at which the block starts.
        line: Physical line there.
    """

    uid: str
    split: str
    offset: int
    line: int


class Diagnosis:
    """Reads blocks of one file again, field by field."""

    def __init__(self, rules: CsvRules, header: Sequence[str]) -> None:
        columns = {column.field.name: column for column in rules.columns()}
        self._columns = [columns[name] for name in header]
        self._nulls = frozenset(null.encode() for null in rules.nulls)
        self._blank_is_record = rules.blank_is_record

    def explain(self, block: bytes, place: BlockPlace, *, final: bool) -> RecordError:
        """The error to raise for a block that the fast path refused."""
        error = self.find(block, place, final=final)
        if error is None:
            where = f"{place.split}: bytes {place.offset} to {place.offset + len(block)}"
            raise InternalError(
                f"{where} were refused by the fast reading but not by the exact one; please report this file"
            )
        return error

    def find(self, block: bytes, place: BlockPlace, *, final: bool) -> RecordError | None:
        """The first error of a block; with ``final`` its end is the end of the file."""
        try:
            for record in iter_records(block, place.line, final=final):
                error = self._check(record, place)
                if error is not None:
                    return error
        except StructureError as error:
            where = self._where(place, error.line, error.index, error.field)
            return RecordError(f"{where}: {error}", uid=place.uid, split=place.split)
        return None

    def _check(self, record: RawRecord, place: BlockPlace) -> RecordError | None:
        if record.is_blank and not self._blank_is_record:
            return None
        if len(record.fields) != len(self._columns):
            return self._wrong_count(record, place)
        for number, field in enumerate(record.fields):
            invalid = self._invalid(field, self._columns[number])
            if invalid is not None:
                where = self._where(place, field.line, field.start, number)
                problem = f"value '{_shown(field.value)}' is not a valid {self._columns[number].field.type}"
                return RecordError(
                    f"{where}: {problem}: {invalid.reason}; {invalid.cure}", uid=place.uid, split=place.split
                )
        return None

    def _invalid(self, field: RawField, column: Column) -> InvalidValueError | None:
        if not field.quoted and field.value in self._nulls:
            return None
        if b"\0" in field.value:
            return InvalidValueError(
                "it contains a NUL character, which PostgreSQL cannot hold", "remove that character"
            )
        try:
            column.convert(field.value.decode())
        except UnicodeDecodeError as error:
            return InvalidValueError(
                f"byte {error.start} of it (0x{field.value[error.start]:02x}) is not UTF-8", "convert the file to UTF-8"
            )
        except InvalidValueError as error:
            return error
        return None

    def _wrong_count(self, record: RawRecord, place: BlockPlace) -> RecordError:
        count, wanted = len(record.fields), len(self._columns)
        if count < wanted:
            names = ", ".join(f'"{column.field.name}"' for column in self._columns[count:])
            detail, cure = f"nothing is left for {names}", "add the missing fields"
        else:
            detail = f"value '{_shown(record.fields[wanted].value)}' belongs to no column"
            cure = "quote values that contain commas"
        where = f"{place.split}:{record.fields[0].line} byte {place.offset + record.start}"
        return RecordError(
            f"{where}: the record has {count} field(s), the header has {wanted}: {detail}; {cure}",
            uid=place.uid,
            split=place.split,
        )

    def _where(self, place: BlockPlace, line: int, index: int, number: int) -> str:
        column = (
            f' column "{self._columns[number].field.name}"' if number < len(self._columns) else f" field {number + 1}"
        )
        return f"{place.split}:{line} byte {place.offset + index}{column}"


def _shown(value: bytes) -> str:
    text = value.decode(errors="backslashreplace")
    shown = text if len(text) <= _VALUE_CHARACTERS_MAX else f"{text[:_VALUE_CHARACTERS_MAX]}… ({len(text)} characters)"
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in shown)
