"""Few combinations of parameters in which any two values of two parameters meet.

A fault that needs one value, or two that meet, shows in these as it does in the full
product, of which they are a small part. Where three must meet for a fault, take the
full product and say why.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest


def pairwise(*axes: Sequence) -> list[tuple]:
    """Returns combinations, one value of each axis, that have every pair of values.

    Always the same ones for axes of the same lengths, in the order of the first axis.

    Args:
        *axes: The values of each parameter.
    """
    lengths = [len(values) for values in axes]
    missing = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(axes)), 2)
        for a, b in itertools.product(range(lengths[i]), range(lengths[j]))
    }
    chosen = [(i,) for i in range(lengths[0])] if len(axes) == 1 else []
    while missing:
        row = _completed(dict(min(missing)), missing, lengths, chosen)
        missing -= set(itertools.combinations(enumerate(row), 2))
        chosen.append(row)
    return [
        tuple(values[i] for values, i in zip(axes, row, strict=True))
        for row in sorted(chosen)
    ]


def _completed(row, missing, lengths, chosen):
    """Fills up a combination with the values that bring most of the missing pairs."""
    for axis in range(len(lengths)):
        if axis not in row:
            used = Counter(one[axis] for one in chosen)

            def gain(value, axis=axis, used=used):
                pairs = [tuple(sorted(((axis, value), other))) for other in row.items()]
                # Of equally good values the rarer one, so that all occur as often.
                return sum(pair in missing for pair in pairs), -used[value]

            row[axis] = max(range(lengths[axis]), key=gain)
    return tuple(row[axis] for axis in range(len(lengths)))


def parametrize_pairwise(**axes: Sequence | Mapping) -> pytest.MarkDecorator:
    """Returns `pytest.mark.parametrize` of the `pairwise` combinations.

    Args:
        **axes: The values of each argument of the test; a mapping names them.
    """
    named = [
        list(
            values.items() if isinstance(values, Mapping) else ((v, v) for v in values)
        )
        for values in axes.values()
    ]
    return pytest.mark.parametrize(
        tuple(axes),
        [
            pytest.param(
                *(value for _, value in combination),
                id="-".join(_id(name) for name, _ in combination),
            )
            for combination in pairwise(*named)
        ],
    )


def _id(name):
    return getattr(name, "name", None) or getattr(name, "__name__", None) or str(name)
