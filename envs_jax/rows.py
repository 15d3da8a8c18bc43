"""Grid rows as slots: a row of symbols is a number, the slot's vocabulary the reachable strings."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from envs_jax.text import Slot


class RowVocabulary:
    """The reachable rows of a grid and the look-up from a row's cells to its index among them.

    A row's cells, read as digits in the base of the symbol count, give a code; most codes cannot occur
    (two players in one row), so a table maps a code to a compact index. Unreachable codes map to 0, an
    index that is in range: terminal states are observed too, though nobody reads them.
    """

    def __init__(
        self, symbols: str, width: int, limits: Mapping[str, int], prefix: str = "", suffix: str = ""
    ):
        """`limits` maps a set of symbols to how many of them a row may hold in all; others are free."""
        base = len(symbols)
        codes = np.arange(base**width)
        places = base ** np.arange(width)[::-1]
        digits = codes[:, None] // places % base  # [codes, width], leftmost cell first
        reachable = np.ones(len(codes), dtype=bool)
        for group, most in limits.items():
            members = np.isin(digits, [symbols.index(symbol) for symbol in group])
            reachable &= members.sum(axis=1) <= most
        self.symbols = symbols
        self.values = tuple(
            prefix + "".join(symbols[d] for d in row) + suffix + "\n" for row in digits[reachable]
        )
        self._places = places.astype(np.int32)
        self._lookup = np.where(reachable, np.cumsum(reachable) - 1, 0).astype(np.int32)

    def slot(self, name: str) -> Slot:
        """A slot of the template; all rows of a board share one vocabulary."""
        return Slot(name, self.values)

    def index(self, cells: Int[Array, "rows width"]) -> Int[Array, "rows"]:
        """Indices into `values` for rows given as positions in `symbols`."""
        codes = jnp.sum(cells * jnp.asarray(self._places)[None, :], axis=1)
        return jnp.asarray(self._lookup)[codes]

    def draw(self, cells: np.ndarray) -> str:
        """The board as text, on the host, rows joined by newlines."""
        return "\n".join("".join(self.symbols[int(cell)] for cell in row) for row in cells)
