"""What a benchmark found: figures against bounds, for people and as one JSON object."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

_ROUNDING_DIGITS = 4


@dataclass(frozen=True, slots=True)
class Check:
    """A figure and the bound it must not exceed.

    Attributes:
        name: What was measured.
        value: The figure; a median where there were several rounds.
        bound: The most it may be.
        unit: Of both; ``×`` for a ratio.
        samples: The figures it was made from, in order of measurement.
    """

    name: str
    value: float
    bound: float
    unit: str
    samples: tuple[float, ...] = ()

    @classmethod
    def of_samples(cls, name: str, samples: Sequence[float], bound: float, unit: str) -> Check:
        """The median of some samples against a bound."""
        return cls(name, median(samples), bound, unit, tuple(samples))

    @property
    def ok(self) -> bool:
        """Whether the bound holds."""
        return self.value <= self.bound

    def to_json(self) -> Mapping[str, Any]:
        """For the JSON object."""
        return {**asdict(self), "ok": self.ok}

    def line(self) -> str:
        """For people."""
        mark = "ok    " if self.ok else "MISSED"
        return f"{mark}  {self.name:<46} {self.value:>9.3f} {self.unit:<3} bound {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one benchmark.

    Attributes:
        benchmark: Its name.
        checks: Figures with bounds.
        figures: Other figures, by name: lists of seconds or bytes.
        setting: What was run on what.
    """

    benchmark: str
    checks: tuple[Check, ...]
    figures: Mapping[str, Sequence[float]] = field(default_factory=dict)
    setting: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every bound holds."""
        return all(check.ok for check in self.checks)

    @property
    def exit_code(self) -> int:
        """0 when every bound holds, else 1."""
        return 0 if self.ok else 1

    def to_json(self) -> str:
        """One object on one line."""
        content = {
            "benchmark": self.benchmark,
            "ok": self.ok,
            "checks": [check.to_json() for check in self.checks],
            "figures": self.figures,
            "setting": self.setting,
        }
        return json.dumps(_rounded(content), ensure_ascii=False)

    def text(self) -> str:
        """Some lines for people."""
        figures = [f"        {name:<46} {median(values):>9.3f} (median)" for name, values in self.figures.items()]
        return "\n".join([*figures, *(check.line() for check in self.checks)])


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _ROUNDING_DIGITS)
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def machine(server_version: str) -> Mapping[str, Any]:
    """What the figures were measured on."""
    return {
        "cores": os.cpu_count(),
        "system": platform.system(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "postgresql": server_version,
        "load_average": os.getloadavg()[0],
    }


def tell(message: str) -> None:
    """Progress, on stderr."""
    print(message, file=sys.stderr, flush=True)
