#include "diagonal_lstm.cpp"  // The same cell, compiled for CUDA.
