"""Sums into the rows of a table, in place."""

from __future__ import annotations

from torch import Tensor


def add_rows(total: Tensor, rows: Tensor, value: Tensor, padding: int | None) -> None:
    """total[rows] += value, several times where a row comes several times; the row `padding` stays as it is.

    total: (V, D). rows: (…), integers in [0, V). value: (…, D), of total's dtype. The same order of sums in every run.
    """
    kept = None if padding is None else total[padding].clone()
    flat, values = rows.reshape(-1), value.reshape(-1, value.shape[-1])
    if total.is_cuda:  # index_add_ has no fixed order there
        total.index_put_((flat,), values, accumulate=True)
    else:
        total.index_add_(0, flat, values)
    if padding is not None and kept is not None:
        total[padding] = kept
