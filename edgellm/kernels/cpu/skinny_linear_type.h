/* Compiled once per instruction set and element type: EDGE_T, EDGE_T_NAME, EDGE_T_TO_FLOAT. */
#define EDGE_T_LOAD EDGE_PASTE(EDGE_PASTE(edge_load, EDGE_T_NAME), EDGE_ISA)
#define EDGE_T_FN(name) EDGE_PASTE(EDGE_PASTE(edge_##name, EDGE_T_NAME), EDGE_ISA)

/* `rows` rows (a constant after inlining) against four weight rows. */
EDGE_INLINE void EDGE_T_FN(block_dots)(const EDGE_T *x, int64_t width, const EDGE_T *const w[4], int rows, float *dots) {
    EDGE_V acc[EDGE_ROW_BLOCK][4];
    memset(acc, 0, sizeof acc);
    EDGE_V xv[EDGE_ROW_BLOCK], wv;
    int64_t i = 0;
    for (; i + EDGE_LANES <= width; i += EDGE_LANES) {
        for (int r = 0; r < rows; r++) EDGE_T_LOAD(&xv[r], x + r * width + i);
        for (int c = 0; c < 4; c++) {
            EDGE_T_LOAD(&wv, w[c] + i);
            for (int r = 0; r < rows; r++) acc[r][c] += xv[r] * wv;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < 4; c++) {
            float dot = EDGE_FN(sum)(&acc[r][c]);
            for (int64_t t = i; t < width; t++) dot += EDGE_T_TO_FLOAT(x[r * width + t]) * EDGE_T_TO_FLOAT(w[c][t]);
            dots[r * EDGE_TILE_COLUMNS + c] = dot;
        }
}

/* Every row is added up in the same order whatever the number of rows, so a row does not depend on its neighbours. */
static void EDGE_T_FN(tile_dots)(const edge_linear_args *a, int64_t first, int64_t columns, float *dots) {
    const EDGE_T *w[EDGE_TILE_COLUMNS];
    for (int64_t c = 0; c < EDGE_TILE_COLUMNS; c++)
        w[c] = (const EDGE_T *)a->weight + (first + (c < columns ? c : columns - 1)) * a->in_width;
    const EDGE_T *x = (const EDGE_T *)a->x;
    int64_t row = 0;
    for (; row + EDGE_ROW_BLOCK <= a->num_rows; row += EDGE_ROW_BLOCK)
        EDGE_T_FN(block_dots)(x + row * a->in_width, a->in_width, w, EDGE_ROW_BLOCK, dots + row * EDGE_TILE_COLUMNS);
    for (; row + 2 <= a->num_rows; row += 2)
        EDGE_T_FN(block_dots)(x + row * a->in_width, a->in_width, w, 2, dots + row * EDGE_TILE_COLUMNS);
    if (row < a->num_rows)
        EDGE_T_FN(block_dots)(x + row * a->in_width, a->in_width, w, 1, dots + row * EDGE_TILE_COLUMNS);
}

#undef EDGE_T_LOAD
#undef EDGE_T_FN
