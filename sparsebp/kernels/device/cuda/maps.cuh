// How the warp form of reduce-then-scan keeps the affine map u -> P u + v of a chunk and sample: row by row, v behind the
// columns of P. Rows begin 16 bytes or more apart, by an odd number of such pieces: lanes that read a row each meet no bank of
// shared memory twice.

#ifndef STATES
#define STATES 1  // vectors of HIDDEN values that the state of a cell consists of
#endif

#ifdef HIDDEN
constexpr int SIDE = STATES * HIDDEN;  // rows of P
constexpr int ROW_PIECES = padded(SIDE + 1) / WIDTH;
constexpr int PITCH = (ROW_PIECES + (ROW_PIECES % 2 ? 0 : 1)) * WIDTH;
constexpr int MAP = SIDE * PITCH;
#endif
