"""What no import statement shows: the CUDA library, which is loaded by its path, and the modules of Triton's kernels."""

from PyInstaller.utils.hooks import collect_data_files, collect_dynamic_libs, collect_submodules

binaries = collect_dynamic_libs("extension_cpp", search_patterns=["_C*.so"])
hiddenimports = collect_submodules("extension_cpp.triton")
datas = collect_data_files("extension_cpp.triton")
module_collection_mode = {"extension_cpp.triton": "pyz+py"}  # Triton compiles kernels from their text.
