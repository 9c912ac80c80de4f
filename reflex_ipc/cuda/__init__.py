"""The CUDA backend. `LIB` is the directory of what was compiled for it when the package was built."""

LIB = __file__.rpartition("/")[0] + "/lib"
