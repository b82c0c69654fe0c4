"""Native code for CPUs: C++ with a C interface, called through ctypes (`library.py`)."""
