"""Implementations of :mod:`etl.source`, one source a file."""

from etl.sources.csv_files import CsvFiles

__all__ = ["CsvFiles"]
