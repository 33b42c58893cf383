"""Every entry of C is summed from the list of its products: for short rows of B, and many products an entry."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from sparsebp.kernels.operands import Pairs
from sparsebp.patterns import SparsityPattern
from sparsebp.products.strategies import positions
from sparsebp.products.strategies.strategy import Strategy
from sparsebp.products.symbolic import row_cuts

ROW_LENGTH = 32
"""Mean length of B's rows, over all products, up to which lists are quicker than loops over the rows; beyond, they
gain little if anything, and an index of places is half as large or less."""
_MOST_CUTS = 64
_CUT_WORK = 2048


class SumPairs(Strategy):
    """A word a product names the entries of A and B; nothing is added to memory."""

    name = "pairs"
    kernel = "spgemm_pairs"
    reads = (Pairs,)

    @property
    def fits(self) -> bool:
        """Some entry is a sum, rows of B are short, and the index is not too large."""
        product = self.product
        terms = int(np.diff(product.a.indptr).max(initial=0))  # no entry is the sum of more
        short = product.products <= ROW_LENGTH * product.a.nnz
        return short and product.products != product.nnz and self._list_bytes <= positions.INDEX_LIMIT and terms < 2**16

    @cached_property
    def word_dtype(self) -> np.dtype:
        """Of words: 32 bits where what an entry of B leaves of them is enough for any row of A."""
        a, b = self.product.a, self.product.b
        narrow = int(np.diff(a.indptr).max(initial=0)) <= 1 << _shift(b, np.uint32)
        return np.dtype(np.uint32 if narrow else np.uint64)

    @property
    def index_bytes(self) -> int:
        """Of the fields of `Pairs`."""
        tiles, _ = self._tiles
        return self._list_bytes + tiles.nbytes + self._cuts.nbytes

    @property
    def _list_bytes(self) -> int:
        """Of the lists alone, which are most of it."""
        return self.word_dtype.itemsize * self.product.products + 3 * np.dtype(np.uint16).itemsize * self.product.nnz

    @cached_property
    def _tiles(self) -> tuple[np.ndarray, np.ndarray]:
        """The field of `Pairs`, yet without numbers of lists, and from where entries of A are counted, by rows."""
        from sparsebp.kernels.host.sparse import pair_lists

        product = self.product
        a, c = product.a, product.pattern
        begins = np.zeros(c.nnz + 1, np.uint32)
        np.cumsum(product.terms, out=begins[1:])
        most = 2 + a.shape[0] + 2 * product.products // pair_lists.MOST_PRODUCTS
        room, first = np.zeros((most, 3 + pair_lists.WRITTEN_OUT), np.int64), np.empty(a.shape[0], np.int64)
        widest = 1 << _shift(product.b, self.word_dtype)
        return room[: 1 + pair_lists.cut_tiles(a.indptr, c.indptr, begins, widest, room, first)].copy(), first

    @cached_property
    def _cuts(self) -> np.ndarray:
        """Tiles in parts of about equal work."""
        tiles, _ = self._tiles
        return row_cuts(tiles[:, 2] + tiles[:, 0], min(_MOST_CUTS, 1 + self.product.products // _CUT_WORK))

    def arrays(self) -> dict[str, np.ndarray]:
        """The fields of `Pairs`."""
        from sparsebp.kernels.host.engine.team import team
        from sparsebp.kernels.host.sparse import pair_lists

        product, (tiles, first), lengths = self.product, self._tiles, self.product.terms
        order, starts, begins = (np.empty(product.nnz, kind) for kind in (np.uint16, np.uint16, np.uint32))
        pair_lists.order_lists(team(), len(self._cuts) - 1, lengths, tiles, self._cuts, order, starts, begins)
        words = product.words(first, begins, _shift(product.b, self.word_dtype), self.word_dtype)
        own = {"words": words, "order": order, "starts": starts, "lengths": lengths}
        return own | {"tiles": tiles, "tile_cuts": self._cuts}

    @classmethod
    def operands(cls, a: SparsityPattern, b: SparsityPattern, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """`Pairs`."""
        return super().operands(a, b, dict(arrays) | {"shift": _shift(b, arrays["words"].dtype)})


def _shift(b: SparsityPattern, dtype: Any) -> int:
    """Return where in a word the entry of B begins."""
    return 32 if np.dtype(dtype) == np.uint64 else 32 - max((b.nnz - 1).bit_length(), 1)
