// Included before a translated device source. TW_SM: CUDA for that architecture; TW_HIP: HIP for gfx9, in waves of 64;
// TW_FNUZ: gfx942's fp8.
#pragma once
#ifdef TW_HIP
#include "hip.hpp"
#else
#include "cuda.hpp"
#endif
