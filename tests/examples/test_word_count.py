"""Words counted by the framework against a counter over the same file, also when the run is killed in between."""

from __future__ import annotations

import csv
import importlib.util
from collections import Counter
from pathlib import Path

from etl.testing import assert_same_result, checkpoint, crash, play, rescale, rows
from etl.testing.harness.marks import Rows
from jobs.word_count import job
from tests.examples.conftest import ExampleProject


def expected_counts() -> Counter[str]:
    found = importlib.util.find_spec("airportsdata")
    assert found is not None
    assert found.origin is not None
    with Path(found.origin).with_name("airports.csv").open(encoding="utf-8", newline="") as file:
        return Counter(word for row in csv.DictReader(file) for word in row["name"].lower().split())


def named(*names: str | None) -> Rows:
    return rows("airports_csv", *({"name": name} for name in names), missing_null=True)


def test_counts_go_on_after_a_crash_and_at_another_parallelism() -> None:
    script = [named("Zebra Airport", None), checkpoint(), named("airport  AIRPORT", ""), crash(), rescale(3)]

    result = play(job, script)

    assert {word: row["times"] for (word,), row in result.table("word_count").items()} == {"zebra": 1, "airport": 3}
    assert result.state("count") == {("zebra",): {"times": 1}, ("airport",): {"times": 3}}


def test_counts_depend_on_the_names_alone() -> None:
    assert_same_result(job, [named("a b", "b", "c a", None, "a"), named("b c d")])


def test_words_are_counted_exactly(examples: ExampleProject) -> None:
    examples.run("jobs.word_count")

    assert Counter(dict(examples.rows("word_count", "word", "times"))) == expected_counts()


def test_counting_goes_on_when_the_file_has_grown(examples: ExampleProject) -> None:
    examples.run("jobs.word_count")
    with (examples.dir / "data" / "airports.csv").open("a", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerow(
            ["ZZZZ", "", "Airport Zebra airport", "", "", "DE", "1.0", "1.0", "1.0", "Europe/Berlin", ""]
        )

    summary = examples.run("jobs.word_count")

    assert summary["rows_written"] == {"word_count": 2}
    expected = expected_counts() + Counter({"airport": 2, "zebra": 1})
    assert Counter(dict(examples.rows("word_count", "word", "times"))) == expected
