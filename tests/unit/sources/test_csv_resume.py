"""Files that grow, change, shrink and vanish between runs."""

from __future__ import annotations

import os
from typing import Any

import pytest

from etl.errors import RecordError, StateError
from etl.sources import CsvFiles
from tests.unit.sources.conftest import Inbox

SCHEMA = {"id": "int4", "name": "text"}
HEADER = b"id,name\n"


def orders(**options: Any) -> CsvFiles:
    return CsvFiles("*.csv", SCHEMA, **options)


def refusal(inbox: Inbox) -> str:
    with pytest.raises(StateError) as caught:
        inbox.pending(orders())
    return str(caught.value)


@pytest.fixture
def read_inbox(inbox: Inbox) -> Inbox:
    """An inbox whose one file of 5,009 rows has been read to its end."""
    inbox.write(HEADER + b"".join(b"%d,x\n" % number for number in range(5009)))
    assert len(inbox.rows(orders())) == 5009
    return inbox


def test_file_read_to_its_end_is_not_listed(read_inbox: Inbox) -> None:
    assert read_inbox.pending(orders()) == []


def test_touched_file_is_not_listed(read_inbox: Inbox) -> None:
    os.utime(read_inbox.directory / "orders.csv", (1, 1))
    assert read_inbox.pending(orders()) == []


def test_grown_file_goes_on_where_it_ended(read_inbox: Inbox) -> None:
    read_inbox.append(b"7,new\n")
    assert read_inbox.rows(orders()) == [(7, "new")]
    assert read_inbox.pending(orders()) == []


def test_position_is_readable_json(inbox: Inbox) -> None:
    inbox.write(HEADER + b"1,x\n2,y\n")
    inbox.batches(orders(batch_rows=1), stop_after=1)
    position = inbox.known["orders.csv"]
    hashes = {name: position[name] for name in ("head_sha256", "tail_sha256")}
    assert {name: position[name] for name in position.keys() - hashes.keys()} == {
        "offset": 12, "line": 3, "size": 16, "head_bytes": 12, "tail_bytes": 12, "unterminated": False,
    }  # fmt: skip
    assert all(len(value) == 64 for value in hashes.values())


def test_truncated_file_is_refused(read_inbox: Inbox) -> None:
    size = read_inbox.known["orders.csv"]["offset"]
    read_inbox.write(HEADER + b"1,x\n")
    assert refusal(read_inbox) == (
        f"orders.csv: {size} bytes had been read, now the file has only 12: it was truncated or replaced; "
        "restore the file as it was, or give the new content a new name"
    )


@pytest.mark.parametrize(("at", "named"), [(9, "its first 4096 bytes"), (-3, "bytes ")])
def test_rewrite_of_the_same_size_and_time_is_refused(read_inbox: Inbox, at: int, named: str) -> None:
    path = read_inbox.directory / "orders.csv"
    before, data = path.stat(), bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert named in refusal(read_inbox)


def test_other_content_under_the_same_name_is_refused(read_inbox: Inbox) -> None:
    (read_inbox.directory / "orders.csv").unlink()
    read_inbox.write(HEADER + b"8,other\n" * 9999)
    assert "first 4096 bytes have changed" in refusal(read_inbox)


def test_vanished_file_is_no_matter_when_it_was_read(read_inbox: Inbox) -> None:
    (read_inbox.directory / "orders.csv").unlink()
    assert read_inbox.pending(orders()) == []
    assert read_inbox.warnings == []


def test_vanished_file_is_refused_when_it_was_half_read(inbox: Inbox) -> None:
    inbox.write(HEADER + b"1,x\n2,y\n")
    inbox.batches(orders(batch_rows=1), stop_after=1)
    (inbox.directory / "orders.csv").unlink()
    assert refusal(inbox) == "orders.csv: only 12 of its 16 bytes had been read, and now it is gone; restore it"


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_missing_line_end_may_come_later(inbox: Inbox, line_end: bytes) -> None:
    inbox.write(HEADER + b"1,x")
    assert inbox.rows(orders()) == [(1, "x")]
    inbox.append(line_end)
    assert inbox.rows(orders()) == []
    inbox.append(b"2,y" + line_end)
    assert inbox.rows(orders()) == [(2, "y")]


def test_missing_line_end_of_one_column_is_no_further_record(inbox: Inbox) -> None:
    source = CsvFiles("*.csv", {"id": "int4"})
    inbox.write(b"id\n1")
    assert inbox.rows(source) == [(1,)]
    inbox.append(b"\n2\n")
    assert inbox.rows(source) == [(2,)]


def test_record_read_as_complete_and_continued_is_refused(inbox: Inbox) -> None:
    inbox.write(HEADER + b"1,spl")
    assert inbox.rows(orders()) == [(1, "spl")]
    inbox.append(b"it\n2,y\n")
    assert refusal(inbox) == (
        "orders.csv: its last record (line 2) had no line end, was read as complete and has since been continued; "
        "correct that row in the target, end its line at byte 13 and append the rest as a record"
    )


def test_unterminated_line_is_held_back_while_following(inbox: Inbox) -> None:
    inbox.write(HEADER + b'1,x\n2,"a\n')
    assert inbox.rows(orders(), follow=True) == [(1, "x")]
    inbox.append(b'b"')
    assert inbox.rows(orders(), follow=True) == []
    inbox.append(b"\n3,")
    assert inbox.rows(orders(), follow=True) == [(2, "a\nb")]
    assert inbox.pending(orders(), follow=True) == []
    assert inbox.rows(orders()) == [(3, None)]


@pytest.mark.parametrize("data", [b"", b"id", b"id,name", b"id,name\r"])
def test_unfinished_header_is_waited_for_while_following(inbox: Inbox, data: bytes) -> None:
    inbox.write(data)
    assert inbox.rows(orders(), follow=True) == []
    assert inbox.known == {}
    inbox.append(b"id,name\n1,x\n"[len(data.strip()) :])
    assert inbox.rows(orders(), follow=True) == [(1, "x")]


@pytest.mark.parametrize("rest", [b'2,a"b', b"2,a\r3,b\r4", b'2,"a"b'])
def test_line_that_can_never_become_right_is_refused_while_following(inbox: Inbox, rest: bytes) -> None:
    inbox.write(HEADER + rest)
    source = orders()
    context = inbox.context(follow=True)
    reader = source.create_reader(context)
    inbox.write(HEADER + b"1,x\n" + rest)
    reader.assign([*source.create_enumerator(inbox.context()).discover({})])
    assert reader.read_batch() is not None
    with pytest.raises(RecordError, match=r"^orders\.csv:3 byte "):
        reader.read_batch()
    reader.close()


def test_file_truncated_while_it_is_read_is_refused(inbox: Inbox) -> None:
    inbox.write(HEADER + b"1,x\n2,y\n3,z\n")
    source = orders(batch_rows=1, block_bytes=4)
    reader = source.create_reader(inbox.context())
    reader.assign(source.create_enumerator(inbox.context()).discover({}))
    assert reader.read_batch() is not None
    os.truncate(inbox.directory / "orders.csv", 10)
    with pytest.raises(StateError, match="now the file has only 10"):
        reader.read_batch()
    reader.close()


def test_stored_position_that_is_none_is_refused(inbox: Inbox) -> None:
    inbox.write(HEADER)
    inbox.known["orders.csv"] = {"offset": "12"}
    assert refusal(inbox).startswith("orders.csv: the stored position is not one of a file (offset, line, size")


def test_header_that_changed_its_order_is_refused(inbox: Inbox) -> None:
    inbox.write(HEADER + b"1,2\n")
    inbox.rows(orders())
    inbox.write(b"name,id\n1,2\n3,4\n")
    assert "have changed" in refusal(inbox)


def test_copy_truncate_rotation_is_refused_not_read_twice_silently(read_inbox: Inbox) -> None:
    read_inbox.write(HEADER + b"1,after\n")
    assert "truncated or replaced" in refusal(read_inbox)


@pytest.mark.parametrize(
    "edited", [{"offset": 11}, {"offset": -1}, {"head_bytes": -1}, {"tail_bytes": -5}, {"line": 0}]
)
def test_stored_position_that_contradicts_itself_is_refused(read_inbox: Inbox, edited: dict[str, int]) -> None:
    read_inbox.known["orders.csv"] = {**read_inbox.known["orders.csv"], **edited}
    assert refusal(read_inbox).startswith("orders.csv: the stored position contradicts itself: {'offset': ")
