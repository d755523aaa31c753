"""Triton's C API: the library, its functions, types, enumerations and errors."""
