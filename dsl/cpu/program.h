/* What a generated program takes and calls: its arguments, the pool it runs on, and how it reports a bad index. */
#ifndef TW_PROGRAM_H
#define TW_PROGRAM_H

#include "vector.h"

/* Tensors by address, element strides of all of them in a row, run-time sizes, and scalar arguments. */
typedef struct tw_args {
    void **data;
    const int64_t *strides;
    const int64_t *sizes;
    const double *numbers;
} tw_args;

/* Runs `run` for every item in 0..items - 1, on up to `threads` threads, each with scratch memory of its own.
   0, or an error number when there is no memory. */
typedef int (*tw_parallel_function)(void (*run)(void *context, int64_t item, void *scratch), void *context,
                                    int64_t items, int64_t scratch_bytes, int threads);

/* The first index that lies outside its tensor: which tensor, which of its axes, the index, the extent there. */
enum { TW_FAULT_SET, TW_FAULT_TENSOR, TW_FAULT_AXIS, TW_FAULT_INDEX, TW_FAULT_EXTENT, TW_FAULT_WORDS };

static inline void tw_report(int64_t *fault, int64_t tensor, int64_t axis, int64_t index, int64_t extent) {
    int64_t none = 0;
    if (!__atomic_compare_exchange_n(&fault[TW_FAULT_SET], &none, 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) return;
    fault[TW_FAULT_TENSOR] = tensor;
    fault[TW_FAULT_AXIS] = axis;
    fault[TW_FAULT_INDEX] = index;
    fault[TW_FAULT_EXTENT] = extent;
}

/* Whether an index that was read from memory lies inside its tensor. */
static inline int tw_inside(int64_t *fault, int64_t tensor, int64_t axis, int64_t index, int64_t extent) {
    if ((uint64_t)index < (uint64_t)extent) return 1;
    tw_report(fault, tensor, axis, index, extent);
    return 0;
}

/* A page that a table names for a key in sight. A negative one is the mark of a key that is not read: a fault here. */
static inline int32_t tw_page(int64_t *fault, int64_t tensor, int32_t page, int64_t extent) {
    if (page < 0) tw_report(fault, tensor, 0, page, extent);
    return page;
}

/* The elements of whole vectors that hold n. */
static inline int64_t tw_whole(int64_t n) { return (n + TW_LANES - 1) / TW_LANES * TW_LANES; }

#endif
