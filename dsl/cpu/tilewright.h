// The runtime of generated CPU kernels: all that a generated file includes.
#ifndef TILEWRIGHT_H
#define TILEWRIGHT_H

#include "vector.h"

#include "elementary.h"
#include "memory.h"
#include "primitives.h"
#include "program.h"
#include "stream.h"

#if !defined(TW_PRIMITIVES_APART)
#include "few_rows.h"
#include "gemm.h"
#include "pack.h"
#include "select.h"
#endif

#endif
