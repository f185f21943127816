/* Looks at the values of a call: are offsets, lengths, page numbers and listed entries what they must be?
 *
 * Two answers only: all is fine, or look again. What is wrong, and the words for it, are codegen_cache/validate.py's
 * business; so "look again" may be said of anything, and "fine" of nothing that it would refuse. Lengths and offsets of
 * 2^31 and more are looked at again, which leaves no sum here that could wrap.
 *
 * The structures are those of codegen_cache/native_checks.py, field by field. */

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define MOST ((int64_t)1 << 31)
#define MANY ((int64_t)1 << 40) /* pairs: more are as good as this many */
#define MOST_VARIABLES 24
#define MOST_DEPTH 32

enum { FINE = 0, LOOK_AGAIN = 1 };

/* An index tensor: which of the call's addresses is its, how its elements are stored, and its strides in elements. */
struct tensor {
  int64_t at, dtype, strides[3];
};

enum { INT32, INT64, UINT32 };

/* A closed form in postfix order: pairs of an operation and, of `CONSTANT` and `VARIABLE`, what it pushes. */
struct form {
  int64_t length;
  const int64_t *code;
};

enum { CONSTANT, VARIABLE, ADD, SUBTRACT, MULTIPLY, FLOOR_DIVIDE, MINIMUM, MAXIMUM };

/* Memory that must not overlap, but for the very same view, where `same` says that shapes and strides are the same. */
struct apart {
  int64_t written, written_bytes, read, read_bytes, same;
};

/* Keys lo..hi of every sequence are read through its row of a table: all of them where it is exact. */
struct reach {
  struct tensor table;
  int64_t width, page, pages, exact;
  struct form lo, hi;
};

/* Entries that rows list, below `limit`, a variable, and read through the table; negative ones are unused. */
struct listed {
  struct tensor entries, table;
  int64_t groups, slots, width, page, pages, limit;
};

/* Variables of a sequence: q0, q1, num_keys, the lengths of each leaf, the call's integer scalars. */
struct plan {
  int64_t aparts, leaves, scalars, reaches, lists, columns;
  const struct apart *apart;
  const struct tensor *lengths;
  const struct reach *reach;
  const struct listed *listed;
  const struct form *column; /* its largest value over sequences with rows is wanted; after the last, the cost: over columns */
  int64_t checked;           /* 0: values are looked at where a column needs them, else only counted */
  int64_t batch, rows, past; /* past: the leaf whose lengths say where rows begin, or -1 */
  struct tensor offsets;
};

struct look {
  const struct plan *plan;
  char *const *data;
  const int64_t *scalars;
  int64_t *columns; /* found: the columns, the cost, and about how many pairs of a row and a key there are */
};

static int64_t element(const struct look *l, const struct tensor *t, int64_t i, int64_t j, int64_t k) {
  int64_t at = i * t->strides[0] + j * t->strides[1] + k * t->strides[2];
  const char *data = l->data[t->at];
  switch (t->dtype) {
    case INT32: return ((const int32_t *)data)[at];
    case INT64: return ((const int64_t *)data)[at];
    default: return ((const uint32_t *)data)[at];
  }
}

static int64_t floor_divide(int64_t a, int64_t b) {
  if (b == 0) return 0; /* as numpy has it */
  int64_t q = a / b;
  return q - (a % b != 0 && (a < 0) != (b < 0));
}

/* False where a value is so large that a further operation might not fit. */
static int evaluate(const struct form *f, const int64_t *variables, int64_t *result) {
  int64_t stack[MOST_DEPTH];
  int64_t *top = stack - 1;
  for (const int64_t *code = f->code, *end = code + 2 * f->length; code < end; code += 2) {
    if (code[0] == CONSTANT) {
      *++top = code[1];
    } else if (code[0] == VARIABLE) {
      *++top = variables[code[1]];
    } else {
      int64_t b = *top--, a = *top;
      switch (code[0]) {
        case ADD: *top = a + b; break;
        case SUBTRACT: *top = a - b; break;
        case MULTIPLY: if (__builtin_mul_overflow(a, b, top)) return 0; break;
        case FLOOR_DIVIDE: *top = floor_divide(a, b); break;
        case MINIMUM: *top = a < b ? a : b; break;
        default: *top = a > b ? a : b; break;
      }
    }
    if (*top > (MOST << 24) || *top < -(MOST << 24)) return 0;
  }
  *result = *top;
  return 1;
}

static int are_apart(const struct look *l) {
  const struct plan *p = l->plan;
  for (const struct apart *a = p->apart, *end = a + p->aparts; a < end; a++) {
    const char *written = l->data[a->written], *read = l->data[a->read];
    int overlap = read < written + a->written_bytes && written < read + a->read_bytes;
    if (overlap && !(a->same && written == read)) return 0;
  }
  return 1;
}

static int pages_fine(const struct look *l, const struct reach *r, int64_t sequence, const int64_t *variables,
                      double *keys) {
  int64_t lo, hi;
  if (!evaluate(&r->lo, variables, &lo) || !evaluate(&r->hi, variables, &hi)) return 0;
  if (lo < 0) lo = 0;
  if (lo >= hi) return 1;
  *keys += (double)(hi - lo);
  if (!l->plan->checked || !r->exact) return 1;
  if (r->page <= 0 || hi > r->width * r->page) return 0;
  for (int64_t column = lo / r->page, last = (hi - 1) / r->page; column <= last; column++) {
    int64_t page = element(l, &r->table, sequence, column, 0);
    if (page < 0 || page >= r->pages) return 0;
  }
  return 1;
}

static int entries_fine(const struct look *l, const struct listed *t, int64_t sequence, int64_t row, int64_t held) {
  int64_t limit = t->width * t->page < held ? t->width * t->page : held;
  for (int64_t group = 0; group < t->groups; group++)
    for (int64_t slot = 0; slot < t->slots; slot++) {
      int64_t entry = element(l, &t->entries, row, group, slot);
      if (entry >= limit) return 0;
      if (entry < 0) continue;
      int64_t page = element(l, &t->table, sequence, entry / t->page, 0);
      if (page < 0 || page >= t->pages) return 0;
    }
  return 1;
}

/* One sequence, of rows first..end - 1, whose pairs with keys are added. */
static int sequence_fine(const struct look *l, int64_t sequence, int64_t first, int64_t end, double *pairs) {
  const struct plan *p = l->plan;
  int64_t variables[MOST_VARIABLES], *v = variables + 3;
  for (int64_t i = 0; i < p->leaves; i++, v++) {
    *v = element(l, &p->lengths[i], sequence, 0, 0);
    if (*v < 0 || *v >= MOST) return 0;
  }
  for (int64_t i = 0; i < p->scalars; i++) *v++ = l->scalars[i];
  int64_t past = p->past < 0 ? 0 : variables[3 + p->past];
  variables[0] = past, variables[1] = past + (end - first) - 1, variables[2] = past + (end - first);
  if (first == end) return 1;
  for (int64_t i = 0; i < p->columns; i++) {
    int64_t found;
    if (!evaluate(&p->column[i], variables, &found)) return 0;
    if (found > l->columns[i]) l->columns[i] = found;
  }
  double keys = 0;
  for (int64_t i = 0; i < p->reaches; i++)
    if (!pages_fine(l, &p->reach[i], sequence, variables, &keys)) return 0;
  for (int64_t i = 0; i < p->lists; i++) {
    keys += (double)p->listed[i].slots;
    for (int64_t row = first; p->checked && row < end; row++)
      if (!entries_fine(l, &p->listed[i], sequence, row, variables[p->listed[i].limit])) return 0;
  }
  *pairs += (double)(end - first) * keys;
  return 1;
}

static int sequences_fine(const struct look *l, double *pairs) {
  const struct plan *p = l->plan;
  int64_t first = element(l, &p->offsets, 0, 0, 0), end = first;
  if (first != 0) return 0;
  for (int64_t sequence = 0; sequence < p->batch; sequence++, first = end) {
    end = element(l, &p->offsets, sequence + 1, 0, 0);
    if (end < first || end > p->rows || !sequence_fine(l, sequence, first, end, pairs)) return 0;
  }
  return end == p->rows;
}

/* FINE or LOOK_AGAIN. Where it is fine, the plan's columns, the cost of a row and the pairs have been written. */
EXPORT int tw_look(const struct look *l) {
  const struct plan *p = l->plan;
  int64_t *cost = &l->columns[p->columns], *found = cost + 1;
  double pairs = 0;
  for (int64_t i = 0; i < p->columns; i++) l->columns[i] = 0;
  *found = MANY;
  if (!are_apart(l)) return LOOK_AGAIN;
  if (!sequences_fine(l, &pairs)) return p->checked || p->columns ? LOOK_AGAIN : FINE; /* nobody wants values looked at */
  if (pairs < (double)MANY) *found = (int64_t)pairs;
  if (p->columns && !evaluate(&p->column[p->columns], l->columns, cost)) return LOOK_AGAIN;
  return FINE;
}

/* Workspaces as kernels find them: beside the checks, because prepared calls need both and load one library. */
EXPORT void tw_fill(int32_t *words, int64_t count, int32_t value) {
  for (int64_t i = 0; i < count; i++) words[i] = value;
}
