"""Native code for CPUs: plain C++ behind a C interface, called through ctypes (`library.py`)."""
