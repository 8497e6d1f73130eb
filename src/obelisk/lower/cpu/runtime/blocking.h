/* Constants and helpers of the matrix products in product.h. */
#define OB_PLACE_ROWS 48     /* the packed way reads b in place for at most so many rows */
#define OB_PLACE_STRIDE 512  /* and where its rows are at most so many elements apart */
#define OB_STREAM_COLUMNS 192 /* the streamed way pays from this width on */
#define OB_SK 6       /* rows of b that the streamed way takes at a time */
#define OB_SUMS 16384 /* sums it keeps at a time: long runs of each row are what memory delivers fastest */
#define OB_AHEAD 12   /* rows of b it fetches ahead */
#define OB_GAP 16     /* elements between rows of sums, so that they do not meet in one set of the cache */

/* n rounded up to a multiple of unit; n cut into equal parts of at most `most`, each a multiple of unit. */
OB_INLINE long ob_up(long n, long unit) { return (n + unit - 1) / unit * unit; }
OB_INLINE long ob_even(long n, long most, long unit) {
  const long parts = (n + most - 1) / most;
  return ob_up((n + parts - 1) / parts, unit);
}
