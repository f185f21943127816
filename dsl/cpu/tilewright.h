// The runtime of generated CPU kernels: all that a generated file includes.
#ifndef TILEWRIGHT_H
#define TILEWRIGHT_H

#include "vector.h"

#include "elementary.h"
#include "few_rows.h"
#include "gemm.h"
#include "memory.h"
#include "pack.h"
#include "program.h"
#include "select.h"

#endif
