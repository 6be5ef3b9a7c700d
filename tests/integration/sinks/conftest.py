from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support_sinks.stage import Stage


@pytest.fixture
def stage(store_url: str) -> Iterator[Stage]:
    stage = Stage(store_url)
    stage.admin.execute("CREATE TABLE public.out (id int8 PRIMARY KEY, note text)")
    yield stage
    stage.close()
