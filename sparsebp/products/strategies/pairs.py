"""Every entry of C is summed from the list of its products: for short rows of B, and many products an entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsebp.core.locks import cached_property
from sparsebp.kernels.operands import Pairs
from sparsebp.patterns import SparsityPattern
from sparsebp.products.strategies import positions
from sparsebp.products.strategies.strategy import Strategy
from sparsebp.products.symbolic import row_cuts

LONE = 1.25
"""Products an entry of C on average below which most entries are one product: a list of it saves no sum."""
LONG = 20
"""Mean length of B's rows, over all products, from which such entries are the quicker added by `Positions`, without a
batch by a tenth to a quarter; its index takes a fifth of the room, and half the time to make."""
_MOST_CUTS = 64
_CUT_WORK = 2048


class SumPairs(Strategy):
    """A word a product names the entries of A and B; nothing is added to memory."""

    name = "pairs"
    kernel = "spgemm_pairs"
    reads = (Pairs,)

    @property
    def fits(self) -> bool:
        """Some entry is a sum, rows of B are short, or entries have many products, and the index is not too large."""
        product = self.product
        if not product.has_short_rows or product.products == product.nnz:
            return False
        short = product.products < LONG * product.a.nnz or product.products >= LONE * product.nnz
        return short and self._list_bytes <= positions.INDEX_LIMIT

    @cached_property
    def word_dtype(self) -> np.dtype:
        """Of words: 32 bits where what an entry of B leaves of them is enough for any row of A."""
        narrow = self.product.longest_row_of_a <= 1 << _shift(self.product.b, np.uint32)
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
        """The field of `Pairs`, yet without numbers of lists, and the first row of every tile."""
        from sparsebp.kernels.host.sparse import pair_lists

        product = self.product
        a, most = product.a, 2 + product.shape[0] + 2 * product.products // pair_lists.MOST_PRODUCTS
        tiles, rows = np.zeros((most, 3 + pair_lists.WRITTEN_OUT), np.int64), np.empty(most, np.int64)
        widest = 1 << _shift(product.b, self.word_dtype)
        structure = a.indptr, product.c_indptr, product.product_ptr, product.terms
        count = pair_lists.cut_tiles(*structure, widest, tiles, rows)
        return tiles[:count].copy(), rows[:count].copy()

    @cached_property
    def _cuts(self) -> np.ndarray:
        """Tiles in parts of about equal work."""
        tiles, _ = self._tiles
        return row_cuts(tiles[:, 2] + tiles[:, 0], min(_MOST_CUTS, 1 + self.product.products // _CUT_WORK))

    def arrays(self) -> dict[str, np.ndarray]:
        """The fields of `Pairs`."""
        product, (tiles, rows) = self.product, self._tiles
        order, starts, words = product.lists(tiles, rows, _shift(product.b, self.word_dtype), self.word_dtype)
        own = {"words": words, "order": order, "starts": starts, "lengths": product.terms}
        return own | {"tiles": tiles, "tile_cuts": self._cuts}

    @classmethod
    def operands(cls, a: SparsityPattern, b: SparsityPattern, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """`Pairs`."""
        return super().operands(a, b, dict(arrays) | {"shift": _shift(b, arrays["words"].dtype)})


def _shift(b: SparsityPattern, dtype: Any) -> int:
    """Return where in a word the entry of B begins."""
    return 32 if np.dtype(dtype) == np.uint64 else 32 - max((b.nnz - 1).bit_length(), 1)
