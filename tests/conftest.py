"""Fixtures of the whole suite; they live in plugin modules under tests/support."""

from __future__ import annotations

pytest_plugins = ["tests.support.postgres"]
