#include "muladd.cpp"  // The same formulas, compiled for CUDA.
