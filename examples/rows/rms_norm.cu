#include "rms_norm.cpp"  // The same passes, compiled for CUDA.
