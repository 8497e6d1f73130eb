/* Exported doors to the task bodies, appended to a generated program by test_mega_tasks.py. */
#define DOOR __attribute__((visibility("default"))) void
DOOR t_norm(const float *x, const float *g, float *h) { om_norm(x, g, h); }
DOOR t_rows(const void *w, const float *s, const float *b, long lo, long hi, long k, const float *x, long xs,
            float *y, long ys) { om_rows(w, s, b, lo, hi, k, x, xs, y, ys); }
DOOR t_residual(const void *w, const float *s, const float *b, long lo, long hi, long k, const float *in, long st,
                float *x) { om_residual(w, s, b, lo, hi, k, in, st, x); }
DOOR t_up(const void *w, const float *s, const float *b, long lo, long hi, const float *h, float *y) {
  om_up(w, s, b, lo, hi, h, y); }
DOOR t_piece(const float *q, const float *k, const float *v, long from, long to, float *o, float *p, float *m) {
  om_piece(q, k, v, from, to, (float (*)[OM_HEAD_DIM])o, p, m); }
DOOR t_combine(long slot, long g, const float *part, float *attn) { om_combine(slot, g, part, attn); }
DOOR t_turn(const float *x, const float *g, const float *c, const float *s, float *y) { om_turn(x, g, c, s, y); }
