"""How transformations are carried out: batches in, batches out.

:func:`operator_for` is the one entry; adding a family of transformations means adding a file that registers itself in
:mod:`etl.operators.dispatch`.
"""

from __future__ import annotations

from etl.operators.dispatch import operator_for

__all__ = ["operator_for"]
