// The bodies of primitives.h, compiled once for an instruction set and linked into every kernel's library.
#include "few_rows.h"
#include "gemm.h"
#include "pack.h"
#include "select.h"
