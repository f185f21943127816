/* Runs one generated program by itself: tensors in memory of exactly their size, scratch likewise. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "program.h"

int tw_program(const tw_args *args, tw_parallel_function parallel, int threads);

static int serially(void (*run)(void *, int64_t, void *), void *context, int64_t items, int64_t bytes, int threads) {
    (void)threads;
    for (int64_t item = 0; item < items; item++) {
        void *scratch;
        if (posix_memalign(&scratch, 64, (size_t)bytes + !bytes)) return 12;
        memset(scratch, 0xff, (size_t)bytes);
        run(context, item, scratch);
        free(scratch);
    }
    return 0;
}

static void *taken(FILE *file, int64_t bytes) {
    void *p = malloc((size_t)bytes + !bytes);
    if (p == NULL || fread(p, 1, (size_t)bytes, file) != (size_t)bytes) exit(3);
    return p;
}

/* argv: a file of counts of tensors, strides, sizes, numbers; bytes of each tensor; then all of these. Tensors come back
   in a second file. */
int main(int argc, char **argv) {
    FILE *in = argc == 3 ? fopen(argv[1], "rb") : NULL;
    if (in == NULL) return 2;
    int64_t *counts = taken(in, 4 * 8), tensors = counts[0];
    int64_t *bytes = taken(in, 8 * tensors);
    int64_t *strides = taken(in, 8 * counts[1]), *sizes = taken(in, 8 * counts[2]);
    double *numbers = taken(in, 8 * counts[3]);
    void **data = malloc(8 * (size_t)(tensors + 1));
    for (int64_t n = 0; n < tensors; n++) data[n] = taken(in, bytes[n]);
    int64_t fault[TW_FAULT_WORDS] = {0};
    data[tensors] = fault;
    tw_args args = {data, strides, sizes, numbers};
    int status = tw_program(&args, serially, 1);
    if (status || fault[TW_FAULT_SET]) {
        fprintf(stderr, "status %d, fault %d: tensor %d axis %d index %ld extent %ld\n", status, (int)fault[0],
                (int)fault[1], (int)fault[2], (long)fault[3], (long)fault[4]);
        return 4;
    }
    FILE *out = fopen(argv[2], "wb");
    for (int64_t n = 0; n < tensors; n++) fwrite(data[n], 1, (size_t)bytes[n], out);
    fclose(out);
    fclose(in);
    for (int64_t n = 0; n < tensors; n++) free(data[n]);
    free(counts), free(bytes), free(strides), free(sizes), free(numbers), free(data);
    return 0;
}
