"""Structure of sparse products on the host: how many entries, which columns, where every product or run lands.

Gustavson's algorithm (F. Gustavson, "Two fast algorithms for sparse matrices", ACM TOMS 4, 1978) without values. Every
row of C is the union of rows of B; nothing is sorted where that can be had otherwise: columns are marked in a set of
bytes, and the set is read in order. What is written does not depend on how rows are split into parts.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.compile import INNER_SERIAL, SERIAL
from sparsebp.kernels.host.engine.simd import count, look_64, lowest, take_64
from sparsebp.kernels.host.engine.threads import parallel

# Repetition in a pattern, on the host: dense blocks, and rows that are equal but for a shift.

# The functions below are compiled: their arguments are index arrays and sizes.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def find_blocks(indptr, indices, rows, columns):
    """Return the largest (m, n) such that the matrix consists of dense and of empty blocks of that size, in a grid.

    Rows change their columns only where a multiple of m begins; runs of columns begin and end at multiples of n.
    """
    ptr, at = simd.pointer(indptr), simd.pointer(indices)
    m, n = rows, columns
    for r in range(rows):
        begin, end = ptr[r], ptr[r + 1]
        if r % m:
            before = ptr[r - 1]
            same = end - begin == begin - before
            for i in range(end - begin if same else 0):
                if at[begin + i] != at[before + i]:
                    same = False
                    break
            if same:  # and so its runs
                continue
            m = _divisor(m, r)
        if n > 1:
            last = -1
            for q in range(begin, end):
                if at[q] != last:
                    n = _divisor(_divisor(n, last if last > 0 else 0), at[q])
                    if n == 1:
                        break
                last = at[q] + 1
            n = _divisor(n, last if last > 0 else 0)
        if m == 1 and n == 1:
            break
    return m, n


@simd.device
def _divisor(a, b):
    """Return the greatest common divisor; 0 has all."""
    while b:
        a, b = b, a % b
    return a


@numba.njit(**SERIAL)
def write_blocks(block_ptr, block_columns, m, n, indptr, indices):
    """Write the pattern of a matrix of dense blocks, whose own pattern is given: (rows + 1,) and (nnz,)."""
    source, columns = simd.pointer(block_columns), simd.pointer(indices)
    at = 0
    indptr[0] = 0
    for g in range(len(block_ptr) - 1):
        for r in range(m):
            for q in range(block_ptr[g], block_ptr[g + 1]):
                first = source[q] * n
                for j in range(n):
                    columns[at] = first + j
                    at += 1
            indptr[g * m + r + 1] = at


# ---- rows that are equal but for a shift, and their runs: see `RowShapes` of `sparsebp.kernels.operands` ------------


@numba.njit(**SERIAL)
def find_row_shapes(indptr, indices, shape, first, examples):
    """Write the number of every row's shape to `shape` and its first column to `first`, (m,) each.

    Writes a row of each shape to `examples` (most,); returns how many shapes there are, `most` + 1 if more than that.
    """
    ptr, columns, count, last = simd.pointer(indptr), simd.pointer(indices), 0, 0
    for r in range(len(indptr) - 1):
        begin = np.int64(ptr[r])
        n = np.int64(ptr[r + 1]) - begin
        first[r] = columns[begin] if n > 0 else 0
        row, found = simd.advance(columns, begin), -1
        for i in range(count):
            s = last + i if last + i < count else last + i - count  # most probably the last one's
            other = np.int64(ptr[examples[s]])
            if np.int64(ptr[examples[s] + 1]) - other == n and _same(row, simd.advance(columns, other), n):
                found = s
                break
        if found < 0:
            if count == len(examples):
                return count + 1
            examples[count] = r
            found, count = count, count + 1
        shape[r] = last = found
    return count


@simd.device
def _same(a, b, n):
    """Return whether two rows of `n` columns are equal but for a shift."""
    if n == 0:
        return True
    shift = a[0] - b[0]
    for begin in range(0, n, 64):
        other = shift ^ shift
        for i in range(begin, min(begin + 64, n)):
            other |= (a[i] - b[i]) ^ shift
        if other != 0:
            return False
    return True


@numba.njit(**SERIAL)
def write_runs(indptr, indices, examples, run_ptr, whole, columns, ends):
    """Write the runs of the rows `examples` as `RowShapes` has them; returns how many there are.

    `columns`, `ends`: as long as these rows have entries.
    """
    u = np.int64(0)
    for s in range(len(examples)):
        begin, n = np.int64(indptr[examples[s]]), np.int64(indptr[examples[s] + 1]) - np.int64(indptr[examples[s]])
        run_ptr[s] = u
        for k in range(n):
            if k == 0 or indices[begin + k] != indices[begin + k - 1] + 1:
                columns[u] = indices[begin + k] - indices[begin]
                u += 1
            ends[u - 1] = k + 1
        whole[s], done = run_ptr[s], np.int64(0)
        width = indices[begin + n - 1] - indices[begin] + 1 if n > 0 else 0
        for v in range(run_ptr[s], u):
            fours = (np.int64(ends[v]) - done + 3) // 4 * 4
            if done + fours > n or columns[v] + fours > width:
                break
            whole[s], done = v + 1, np.int64(ends[v])
    run_ptr[len(examples)] = u
    return u


@numba.njit(**SERIAL)
def cross_pages(shape, first, run_ptr, columns, ends, page):
    """Say whether a page ends within any run, or a run of two rows of one shape lies in pages of different distance."""
    furthest = np.zeros(len(run_ptr) - 1, np.int64)  # where in its page a row of every shape begins at most
    for r in range(len(shape)):
        furthest[shape[r]] = max(furthest[shape[r]], np.int64(first[r]) % page)
    for s in range(len(run_ptr) - 1):
        begin = np.int64(0)
        for u in range(run_ptr[s], run_ptr[s + 1]):
            last = np.int64(columns[u]) % page + ends[u] - begin - 1
            if furthest[s] + last >= page:
                return True
            begin = np.int64(ends[u])
    return False


# Structure of `Pairs` on the host: how many products every entry of C has, which, and in which order they are met.

MOST_PRODUCTS = 1024
"""Products of one tile, unless one entry has more: words and the entries that they name stay in the first cache."""
WRITTEN_OUT = 8
"""Entries with at most this many products are counted for each tile."""

# The functions below are compiled: their arguments are index arrays, sizes and flags. `cuts`: rows where parts begin.


@numba.njit(**SERIAL)
def cut_tiles(a_indptr, c_indptr, product_ptr, terms, most_of_a, tiles, rows):
    """Cut C into tiles of whole rows, or of a piece of a long row, whose entries have `terms` products, (nnz,).

    Writes the first entry of C, the first of A and the first word of every tile to `tiles` (most, 11), and its first
    row to `rows` (most,); returns the number of tiles, including one past the last.
    """
    count, begin, m = 0, 0, len(c_indptr) - 1
    while begin < m:
        end = begin + 1
        while (
            end < m
            and product_ptr[end + 1] - product_ptr[begin] <= MOST_PRODUCTS
            and a_indptr[end + 1] - a_indptr[begin] <= most_of_a
        ):
            end += 1
        c, p, last = np.int64(c_indptr[begin]), product_ptr[begin], np.int64(c_indptr[end])
        while c < last:
            tiles[count, 0], tiles[count, 1], tiles[count, 2], rows[count] = c, a_indptr[begin], p, begin
            count += 1
            if product_ptr[end] - product_ptr[begin] <= MOST_PRODUCTS:
                c = last
            else:
                products, c = np.int64(terms[c]), c + 1
                while c < last and products + terms[c] <= MOST_PRODUCTS:  # so there are not too many entries
                    products += terms[c]
                    c += 1
                p += products
        begin = end
    tiles[count, 0], tiles[count, 1], tiles[count, 2], rows[count] = c_indptr[m], a_indptr[m], product_ptr[m], m
    return count + 1


@parallel(**SERIAL)
def write_lists(
    part, parts, a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, lengths, tiles, rows, cuts, sizes,
    shift, order, starts, words,
):  # fmt: skip
    """Write the lists of every tile, ordered by their lengths, which are given, (nnz,) uint16.

    Writes the order and the starts (nnz,) uint16 within a tile, how many have 1, 2, … words to ``tiles[:, 3:]``, and
    the words (n_products,). `cuts`: tiles where parts begin. `sizes`: the number of columns, and the most products of
    an entry.
    """
    a_ptr, a_columns, b_ptr = simd.pointer(a_indptr), simd.pointer(a_indices), simd.pointer(b_indptr)
    b_columns, c_ptr, c_columns = simd.pointer(b_indices), simd.pointer(c_indptr), simd.pointer(c_indices)
    written, bits = simd.pointer(words), np.uint64(shift)
    place, before = np.empty(sizes[0], np.uint32), np.empty(sizes[1] + 1, np.int64)
    next_word = simd.pointer(place)
    t, end = cuts[part], cuts[part + 1]
    while 0 < t < end and rows[t] == rows[t - 1]:  # the row belongs to the part where it begins
        t += 1
    while t < end:
        after = t + 1
        while rows[after] == rows[t] and after < len(tiles) - 1:  # pieces of one row
            after += 1
        for s in range(t, after):
            _order_lists(lengths, tiles, s, before, order, starts)
        for r in range(rows[t], rows[after]):
            for s in range(t, after):
                word, begin = tiles[s, 2], np.int64(c_ptr[r])
                for c in range(max(begin, tiles[s, 0]), min(np.int64(c_ptr[r + 1]), tiles[s + 1, 0])):
                    next_word[c_columns[c]] = word + starts[c]
            for k in range(a_ptr[r], a_ptr[r + 1]):
                m, low = a_columns[k], np.uint64(k - tiles[t, 1])
                for q in range(b_ptr[m], b_ptr[m + 1]):
                    j = b_columns[q]
                    at = np.int64(next_word[j])
                    next_word[j] = at + 1
                    written[at] = low | (np.uint64(q) << bits)
        t = after
    simd.keep_alive(place)


@simd.device
def _order_lists(lengths, tiles, t, before, order, starts):
    """Order the lists of one tile. `before`: scratch, lists (low half) and words (high) before those of length n."""
    begin, end = tiles[t, 0], tiles[t + 1, 0]
    n_of, nth, start = (
        simd.advance(simd.pointer(lengths), begin),
        simd.advance(simd.pointer(order), begin),
        simd.advance(simd.pointer(starts), begin),
    )
    count, longest = simd.pointer(before), np.int64(0)
    for c in range(end - begin):
        longest = np.int64(max(longest, np.int64(n_of[c])))
    for length in range(longest + 1):
        count[length] = 0
    for c in range(end - begin):
        count[n_of[c]] += 1
    total = np.int64(0)
    for length in range(1, longest + 1):
        lists = count[length]
        if length <= WRITTEN_OUT:
            tiles[t, 2 + length] = lists
        count[length] = total
        total += lists + ((lists * length) << 32)
    for c in range(end - begin):
        n = np.int64(n_of[c])
        now = count[n]
        count[n] = now + 1 + (n << 32)
        nth[now & 0xFFFFFFFF] = c
        start[c] = now >> 32


NEAR = 128
"""Columns a product of a row up to which its columns are looked for, 64 at a time, between the first and the last one;
beyond, only in those groups of 64 that were met."""
FAR = 1 << 15
"""The same above which they are sorted."""
SLACK = 128
"""Entries behind the last one of a part that `find_rows` may write to."""

# The functions below are compiled: their arguments are index arrays, sizes and flags. `cuts`: rows where parts begin.


@parallel(**SERIAL)
def count_entries(part, parts, a_indptr, a_indices, b_indptr, b_indices, cuts, stamps, counts):
    """Write the number of entries of every row of C to `counts` (m,). `stamps`: zeros, uint16 (parts, columns)."""
    a_ptr, a_columns = simd.pointer(a_indptr), simd.pointer(a_indices)
    b_ptr, b_columns, written = simd.pointer(b_indptr), simd.pointer(b_indices), simd.pointer(counts)
    stamp_of = own_scratch(stamps, part)
    stamp = np.uint16(0)
    for r in range(cuts[part], cuts[part + 1]):
        stamp = np.uint16(stamp + 1)
        if stamp == 0:  # all stamps are used up
            for j in range(stamps.shape[1]):
                stamp_of[j] = 0
            stamp = np.uint16(1)
        total = 0
        for k in range(a_ptr[r], a_ptr[r + 1]):
            m = a_columns[k]
            for q in range(b_ptr[m], b_ptr[m + 1]):
                j = b_columns[q]
                total += stamp_of[j] != stamp
                stamp_of[j] = stamp
        written[r] = total


@simd.device
def own_scratch(scratch, part):
    """Return the part's own row of scratch."""
    return simd.advance(simd.pointer(scratch), part * scratch.shape[1])


@parallel(**SERIAL)
def find_rows(
    part, parts, a_indptr, a_indices, b_indptr, b_indices, product_ptr, cuts, begins, marks, groups, counts, columns,
    terms,
):  # fmt: skip
    """Write the sorted columns of the rows of C, each part's one after the other from ``begins[part]`` on.

    `counts`: how many entries every row has, (m,) int64. `terms`: how many products every entry has, uint16, where the
    columns are, or empty. `marks`: zeros, (parts, columns + 64), of a type that holds these numbers. `groups`: zeros,
    uint8 (parts, columns / 64 + 65).
    """
    a_ptr, a_columns = simd.pointer(a_indptr), simd.pointer(a_indices)
    b_ptr, b_columns, found = simd.pointer(b_indptr), simd.pointer(b_indices), simd.pointer(columns)
    marked, grouped, of_row = own_scratch(marks, part), own_scratch(groups, part), simd.pointer(counts)
    times, counted = simd.pointer(terms), len(terms) > 0
    keep, at = -1 if counted else 0, begins[part]
    for r in range(cuts[part], cuts[part + 1]):
        begin, products = at, product_ptr[r + 1] - product_ptr[r]
        first, last = np.int64(marks.shape[1]), np.int64(-1)
        for k in range(a_ptr[r], a_ptr[r + 1]):
            left, right = b_ptr[a_columns[k]], b_ptr[a_columns[k] + 1]
            if left < right:
                first, last = min(first, np.int64(b_columns[left])), max(last, np.int64(b_columns[right - 1]))
        if last - first < NEAR * products:
            for k in range(a_ptr[r], a_ptr[r + 1]):
                m = a_columns[k]
                for q in range(b_ptr[m], b_ptr[m + 1]):
                    marked[b_columns[q]] = (marked[b_columns[q]] & keep) + 1
            for base in range(first & -64, last + 1, 64):
                at = _list(look_64(marked, base) if counted else take_64(marked, base), base, found, at)
        elif last - first < FAR * products:
            for k in range(a_ptr[r], a_ptr[r + 1]):
                m = a_columns[k]
                for q in range(b_ptr[m], b_ptr[m + 1]):
                    j = b_columns[q]
                    marked[j] = (marked[j] & keep) + 1
                    grouped[j >> 6] = 1
            for group in range(first >> 6, (last >> 6) + 1, 64):
                met = take_64(grouped, group)
                while met != 0:
                    base = (group + lowest(met)) << 6
                    met &= met - np.uint64(1)
                    at = _list(look_64(marked, base) if counted else take_64(marked, base), base, found, at)
        else:
            for k in range(a_ptr[r], a_ptr[r + 1]):
                m = a_columns[k]
                for q in range(b_ptr[m], b_ptr[m + 1]):
                    j = b_columns[q]
                    if marked[j] == 0:
                        found[at] = j
                        at += 1
                    marked[j] = (marked[j] & keep) + 1
            sort(found, begin, at)
            for i in range(begin, at if not counted else begin):
                marked[found[i]] = 0
        for i in range(begin, at if counted else begin):
            times[i] = marked[found[i]]
            marked[found[i]] = 0
        of_row[r] = at - begin


@numba.njit(**INNER_SERIAL)
def sort(values, begin, end):
    """Sort numbers in place (Shell's method; Numba's own sort takes longer to compile than all the rest here)."""
    gap = end - begin
    while gap > 1:
        gap = 1 if gap < 5 else (5 * gap - 1) // 11
        for i in range(begin + gap, end):
            value, at = values[i], i
            while at >= begin + gap and values[at - gap] > value:
                values[at] = values[at - gap]
                at -= gap
            values[at] = value


@simd.device
def _list(found, base, columns, at):
    """Write ``base + i`` for every bit i of `found` from ``columns[at]`` on; return where the next one goes.

    Several at a time, known or not: a branch for each would often be guessed wrong.
    """
    n = count(found)
    for u in range(4):
        columns[at + u] = base + lowest(found)
        found &= found - np.uint64(1)
    for i in range(4, n, 8):
        for u in range(8):
            columns[at + i + u] = base + lowest(found)
            found &= found - np.uint64(1)
    return at + n


@parallel(**SERIAL)
def join_rows(part, parts, begins, ends, columns, terms, joined, joined_terms):
    """Copy a part's columns from ``begins[part]`` on to their place, ``ends[part]`` to ``ends[part + 1]``."""
    begin, target, n = begins[part], ends[part], ends[part + 1] - ends[part]
    simd.copy(simd.advance(simd.pointer(joined), target), simd.advance(simd.pointer(columns), begin), n)
    if len(terms) > 0:
        simd.copy(simd.advance(simd.pointer(joined_terms), target), simd.advance(simd.pointer(terms), begin), n)


@numba.njit(**SERIAL)
def count_products(a_indptr, a_indices, b_indptr, columns, product_ptr, room):
    """Write how many products there are before every row of C, and how many entries at most, (m + 1,) int64 each."""
    a_ptr, a_columns, b_ptr = simd.pointer(a_indptr), simd.pointer(a_indices), simd.pointer(b_indptr)
    total, most = np.int64(0), np.int64(0)
    for r in range(len(a_indptr) - 1):
        product_ptr[r], room[r], before = total, most, total
        for k in range(a_ptr[r], a_ptr[r + 1]):
            total += b_ptr[a_columns[k] + 1] - b_ptr[a_columns[k]]
        most += min(total - before, columns)
    product_ptr[len(a_indptr) - 1], room[len(a_indptr) - 1] = total, most


@parallel(**SERIAL)
def write_positions(
    part, parts, a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, product_ptr, cuts, places, positions
):
    """Write where in its row of C every product lands, in Gustavson's order, to `positions` (n_products,).

    `places`: scratch of the type of `positions`, (parts, columns).
    """
    a_ptr, a_columns = simd.pointer(a_indptr), simd.pointer(a_indices)
    b_ptr, b_columns = simd.pointer(b_indptr), simd.pointer(b_indices)
    place, first_product = own_scratch(places, part), simd.pointer(product_ptr)
    for r in range(cuts[part], cuts[part + 1]):
        place_columns(c_indptr, c_indices, r, place)
        p = first_product[r]
        for k in range(a_ptr[r], a_ptr[r + 1]):
            m = a_columns[k]
            left = b_ptr[m]
            length = b_ptr[m + 1] - left
            row, out = simd.advance(b_columns, left), simd.advance(simd.pointer(positions), p)
            for q in range(length):
                out[q] = place[row[q]]
            p += length


@simd.device
def place_columns(c_indptr, c_indices, r, place):
    """Note for every column of row r of C where in the row it stands."""
    c_ptr = simd.pointer(c_indptr)
    begin = c_ptr[r]
    columns = simd.advance(simd.pointer(c_indices), begin)
    for i in range(c_ptr[r + 1] - begin):
        place[columns[i]] = i


@parallel(**SERIAL)
def write_pairs(
    part, parts, a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, cuts, places, a_index, b_index
):
    """Write which entries of A and B the one product of every entry of C multiplies, to two arrays (nnz,).

    `places`: scratch of int64, (parts, columns).
    """
    a_ptr, a_columns = simd.pointer(a_indptr), simd.pointer(a_indices)
    b_ptr, b_columns = simd.pointer(b_indptr), simd.pointer(b_indices)
    c_ptr, place, a_entry, b_entry = (
        simd.pointer(c_indptr),
        own_scratch(places, part),
        simd.pointer(a_index),
        simd.pointer(b_index),
    )
    for r in range(cuts[part], cuts[part + 1]):
        place_columns(c_indptr, c_indices, r, place)
        for k in range(a_ptr[r], a_ptr[r + 1]):
            m = a_columns[k]
            for q in range(b_ptr[m], b_ptr[m + 1]):
                i = c_ptr[r] + place[b_columns[q]]
                a_entry[i] = k
                b_entry[i] = q


# ---- products of single entries that land in a mask: see `Terms` of `sparsebp.kernels.operands` ----------------------


@parallel(**SERIAL)
def count_masked(part, parts, a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, cuts, places, counts):
    """Write how many products of every row land in entries of C, to `counts` (m,); scratch as in `write_masked`."""
    a_ptr, a_columns = simd.pointer(a_indptr), simd.pointer(a_indices)
    b_ptr, b_columns = simd.pointer(b_indptr), simd.pointer(b_indices)
    place = own_scratch(places, part)
    for r in range(cuts[part], cuts[part + 1]):
        counts[r] = found = 0
        if c_indptr[r] == c_indptr[r + 1]:
            continue
        _number_columns(c_indptr, c_indices, r, place)
        for k in range(a_ptr[r], a_ptr[r + 1]):
            for q in range(b_ptr[a_columns[k]], b_ptr[a_columns[k] + 1]):
                found += place[b_columns[q]] != 0
        counts[r] = found
        _clear_columns(c_indptr, c_indices, r, place)


@parallel(**SERIAL)
def write_masked(
    part, parts, a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, cuts, places,
    product_ptr, a_index, b_index, positions,
):  # fmt: skip
    """Write which entries of A and B these products multiply, and where in its row of C each lands, (products,).

    `places`: scratch of 0, uint32, (parts, columns).
    """
    a_ptr, a_columns = simd.pointer(a_indptr), simd.pointer(a_indices)
    b_ptr, b_columns = simd.pointer(b_indptr), simd.pointer(b_indices)
    place = own_scratch(places, part)
    for r in range(cuts[part], cuts[part + 1]):
        p = product_ptr[r]
        if p == product_ptr[r + 1]:
            continue
        _number_columns(c_indptr, c_indices, r, place)
        for k in range(a_ptr[r], a_ptr[r + 1]):
            for q in range(b_ptr[a_columns[k]], b_ptr[a_columns[k] + 1]):
                i = place[b_columns[q]]
                if i != 0:
                    a_index[p], b_index[p], positions[p] = k, q, i - 1
                    p += 1
        _clear_columns(c_indptr, c_indices, r, place)


@simd.device
def _number_columns(c_indptr, c_indices, r, place):
    """Number the columns of row r of C from 1."""
    begin = c_indptr[r]
    for i in range(c_indptr[r + 1] - begin):
        place[c_indices[begin + i]] = i + 1


@simd.device
def _clear_columns(c_indptr, c_indices, r, place):
    for i in range(c_indptr[r], c_indptr[r + 1]):
        place[c_indices[i]] = 0


# ---- runs of neighbouring columns: see `Runs` of `sparsebp.kernels.operands` ----------------------------------------


@numba.njit(**SERIAL)
def find_shapes(indptr, indices, shapes, runs_of_row):
    """Write the number of every row's shape and how many runs it has, (n_rows,) each."""
    ptr, columns = simd.pointer(indptr), simd.pointer(indices)
    shape = -1
    for r in range(len(indptr) - 1):
        begin, end = ptr[r], ptr[r + 1]
        same = r > 0 and end - begin == begin - ptr[r - 1]
        runs = 0
        for q in range(begin, end):
            runs += q == begin or columns[q] != columns[q - 1] + 1
            same = same and columns[q] == columns[q - (end - begin)]
        shape += not same
        shapes[r] = shape
        runs_of_row[r] = runs


@numba.njit(**SERIAL)
def measure_runs(indptr, indices, rows, lengths):
    """Write the lengths of the runs of these rows, (n_runs,)."""
    u = -1
    for r in rows:
        for q in range(indptr[r], indptr[r + 1]):
            if q == indptr[r] or indices[q] != indices[q - 1] + 1:
                u += 1
                lengths[u] = 0
            lengths[u] += 1


@numba.njit(**SERIAL)
def count_starts(a_indptr, a_indices, shapes, run_ptr, counts):
    """Write how many starts every row of A has to `counts` (m,); return how many runs its products consist of."""
    pieces = 0
    for r in range(len(a_indptr) - 1):
        last, total = -1, 0
        for k in range(a_indptr[r], a_indptr[r + 1]):
            shape = shapes[a_indices[k]]
            runs = run_ptr[shape + 1] - run_ptr[shape]
            pieces += runs
            if shape != last:
                total += runs
                last = shape
        counts[r] = total
    return pieces


@parallel(**SERIAL)
def write_starts(
    part, parts, a_indptr, a_indices, b_indptr, b_indices, c_indptr, c_indices, shapes, run_ptr, lengths, start_ptr,
    columns, cuts, starts,
):  # fmt: skip
    """Write where in its row of C every run of every group of A's entries begins, to `starts` (n_starts,)."""
    place = np.empty(columns, np.int64)
    for r in range(cuts[part], cuts[part + 1]):
        begin = c_indptr[r]
        for i in range(begin, c_indptr[r + 1]):
            place[c_indices[i]] = i - begin
        last, at = -1, start_ptr[r]
        for k in range(a_indptr[r], a_indptr[r + 1]):
            m = a_indices[k]
            shape = shapes[m]
            if shape == last:
                continue
            last, q = shape, b_indptr[m]
            for u in range(run_ptr[shape], run_ptr[shape + 1]):
                starts[at] = place[b_indices[q]]
                at += 1
                q += lengths[u]


# Union of two sparse structures on the host: rows are merged, as both are sorted.

# The functions below are compiled: their arguments are index arrays.


@parallel(**SERIAL)
def count_union(part, parts, a_indptr, a_indices, b_indptr, b_indices, cuts, counts):
    """Write the number of entries of every row of A + B to `counts` (m,)."""
    a_columns, b_columns = simd.pointer(a_indices), simd.pointer(b_indices)
    for r in range(cuts[part], cuts[part + 1]):
        i, j = a_indptr[r], b_indptr[r]
        a_end, b_end = a_indptr[r + 1], b_indptr[r + 1]
        total = (a_end - i) + (b_end - j)
        while i < a_end and j < b_end:
            left, right = a_columns[i], b_columns[j]
            total -= left == right
            i += left <= right
            j += right <= left
        counts[r] = total


@parallel(**SERIAL)
def write_union(part, parts, a_indptr, a_indices, b_indptr, b_indices, cuts, c_indptr, c_indices, a_index, b_index):
    """Write the columns of A + B and the places of the entries of A and B among them (nnz_c,), (nnz_a,), (nnz_b,)."""
    a_columns, b_columns, c_columns = simd.pointer(a_indices), simd.pointer(b_indices), simd.pointer(c_indices)
    a_place, b_place = simd.pointer(a_index), simd.pointer(b_index)
    for r in range(cuts[part], cuts[part + 1]):
        i, j, at = a_indptr[r], b_indptr[r], c_indptr[r]
        a_end, b_end = a_indptr[r + 1], b_indptr[r + 1]
        while i < a_end and j < b_end:
            left, right = a_columns[i], b_columns[j]
            c_columns[at] = min(left, right)
            if left <= right:
                a_place[i] = at
                i += 1
            if right <= left:
                b_place[j] = at
                j += 1
            at += 1
        while i < a_end:
            c_columns[at], a_place[i] = a_columns[i], at
            i, at = i + 1, at + 1
        while j < b_end:
            c_columns[at], b_place[j] = b_columns[j], at
            j, at = j + 1, at + 1
