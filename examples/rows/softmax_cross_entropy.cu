#include "softmax_cross_entropy.cpp"  // The same passes, compiled for CUDA.
