"""Rectangles become a small picture: how much of each cell they cover, exactly.

A rectangle's coverage is a product of two steps up and two steps down. A step inside a cell is shared
between it and the next one; summing up along both axes gives the rest. So a rectangle costs 16 additions,
however large it is, and any number of rectangles makes a picture of fixed size.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snapd.forensics.page.data import F64, U8


class Coverage:
    """Sums of rectangles on a grid of *rows* by *columns*; both axes go from 0 to 1."""

    def __init__(self, rows: int, columns: int) -> None:
        import numpy as np

        self._rows = rows
        self._columns = columns
        # Two more on each axis: a step on the far edge is shared with what lies beyond it.
        self._steps = np.zeros((rows + 2) * (columns + 2))

    def add(self, x0: "F64", x1: "F64", y0: "F64", y1: "F64") -> None:
        """Add rectangles [x0, x1) x [y0, y1), each of shape [n]; what is outside of 0 to 1 is cut off."""
        import numpy as np

        width = self._columns + 2
        for x, x_sign in ((x0, 1.0), (x1, -1.0)):
            at_x = np.clip(x, 0.0, 1.0) * self._columns
            column = at_x.astype(np.int64)
            x_rest = at_x - column
            for y, y_sign in ((y0, 1.0), (y1, -1.0)):
                at_y = np.clip(y, 0.0, 1.0) * self._rows
                row = at_y.astype(np.int64)
                y_rest = at_y - row
                for d_row, y_weight in ((0, 1.0 - y_rest), (1, y_rest)):
                    for d_column, x_weight in ((0, 1.0 - x_rest), (1, x_rest)):
                        self._steps += np.bincount(
                            (row + d_row) * width + column + d_column,
                            weights=x_sign * y_sign * x_weight * y_weight,
                            minlength=self._steps.size,
                        )

    def shares(self) -> "F64":
        """Return the covered share of each cell, shape [rows, columns]; more than 1 where they overlap."""
        import numpy as np

        steps = self._steps.reshape(self._rows + 2, self._columns + 2)
        covered: F64 = steps.cumsum(axis=0).cumsum(axis=1)[: self._rows, : self._columns]
        # What is left of rounding is nothing.
        return np.where(np.abs(covered) < 1e-9, 0.0, covered)

    def shades(self) -> "U8":
        """Return the shares as 0 to 255; what is covered at all is at least 1."""
        import numpy as np

        shares = np.clip(self.shares(), 0.0, 1.0)
        return np.where(shares > 0.0, np.maximum(np.rint(shares * 255), 1), 0).astype(np.uint8)
