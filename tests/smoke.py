"""What a user tries first: the examples that the operators' docstrings show."""

import doctest
import sys

import torch

import extension_cpp

names = extension_cpp.ops.__all__
runner = doctest.DocTestRunner()
for name in names:
    known = {"torch": torch, "extension_cpp": extension_cpp}
    for test in doctest.DocTestFinder(recurse=False).find(getattr(extension_cpp, name), name, globs=known):
        runner.run(test)
if runner.failures or runner.tries < len(names):
    sys.exit(f"{runner.failures} of {runner.tries} examples of {len(names)} operators failed")
kernels = "with CUDA kernels" if torch.version.cuda and not extension_cpp.load_errors else "on the CPU"
print(f"{len(names)} of {len(names)} operators do as documented under torch {torch.__version__}, {kernels}")
