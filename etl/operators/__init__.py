"""How transformations are carried out: batches in, batches out.

:func:`operator_for` is the one entry; a new transformation needs an operator in a file of its family and a case in
:mod:`etl.operators.dispatch`.
"""

from __future__ import annotations

from etl.operators.dispatch import operator_for

__all__ = ["operator_for"]
