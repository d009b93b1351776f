"""`python -m extension_cpp`, a report of what is installed, and `doctor`, which says what is wrong and what fixes it.

Works if the package, torch or rich can't be imported: nothing here needs more than the standard library.
"""
