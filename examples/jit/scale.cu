#include "scale.cpp"  // The same formula, compiled for CUDA.
