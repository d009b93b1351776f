// Makes the library importable as extension_cpp._C. Loading it is all there is to do: the static initialisers of the
// other files register the operators. Only CPython's limited API is used, so one file works with every CPython >= 3.10.
#include <Python.h>

// A C++ program without Python loads the library too, and binds all symbols at once where LD_BIND_NOW is set.
#pragma weak PyModule_Create2

static PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__C() {
  return PyModule_Create(&module_def);
}
