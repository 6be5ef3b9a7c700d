"""The advice of docs/operations.md helps when it is followed to the letter."""

from __future__ import annotations

import re

from tests.examples.conftest import CHECKOUT, ExampleProject

FLIGHTS = 336_776


def advice(beginning: str) -> str:
    """The SQL block of the document that begins so."""
    text = (CHECKOUT / "docs" / "operations.md").read_text(encoding="utf-8")
    (block,) = [sql for sql in re.findall(r"```sql\n(.*?)```", text, flags=re.DOTALL) if sql.startswith(beginning)]
    return str(block)


def test_lost_rows_stop_the_job_until_they_are_put_back_as_advised(examples: ExampleProject) -> None:
    last = examples.run("jobs.flights")["checkpoint"]
    with examples.connection() as connection:
        connection.execute(
            "DELETE FROM etl.commit_ledger WHERE checkpoint_id = %s AND sink_id ="
            " (SELECT sink_id FROM etl.sink WHERE uid = 'flights')",
            [last],
        )
    code, _, err = examples.attempt("jobs.flights")
    assert code == 70
    assert "ALARM" in err
    assert examples.count("SELECT count(*) FROM flights") == FLIGHTS

    with examples.connection() as connection:
        ranges = connection.execute(advice("SELECT p.uid").encode()).fetchall()
        connection.execute(advice("BEGIN;").replace("checkpoint_id = 6", f"checkpoint_id = {last}").encode())

    assert [row[:3] for row in ranges[:2]] == [
        ("flights_csv", "data/flights.csv", number) for number in (last, last - 1)
    ]
    assert examples.run("jobs.flights")["rows_read"] == 0
