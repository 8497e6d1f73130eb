/* Exported doors to the task bodies, appended to a generated program by test_mega_tasks.py. */
#define DOOR __attribute__((visibility("default"))) void
DOOR t_norm(const float *x, const float *g, float *h) { om_norm(x, g, h); }
DOOR t_rows(const char *w, const void *s, const uint8_t *z, const float *b, long lo, long hi, long k, const float *x, long xs,
            float *y, long ys) { om_rows((om_matrix){w, s, z}, b, lo, hi, k, x, xs, y, ys); }
DOOR t_residual(const char *w, const void *s, const uint8_t *z, const float *b, long lo, long hi, long k, const float *in, long st,
                float *x) { om_residual((om_matrix){w, s, z}, b, lo, hi, k, in, st, x); }
DOOR t_up(const char *w, const void *s, const uint8_t *z, const float *b, long lo, long hi, const float *h, float *y) {
  om_up((om_matrix){w, s, z}, b, lo, hi, h, y); }
DOOR t_piece(const float *q, const float *k, const float *v, long from, long to, float *o, float *p, float *m) {
  om_piece(q, k, v, from, to, (float (*)[OM_HEAD_DIM])o, p, m); }
DOOR t_combine(long slot, long g, const float *part, float *attn) { om_combine(slot, g, part, attn); }
DOOR t_turn(const float *x, const float *g, const float *c, const float *s, float *y) { om_turn(x, g, c, s, y); }
