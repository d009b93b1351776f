#include "convrnn.cpp"  // The same function, compiled for CUDA.
