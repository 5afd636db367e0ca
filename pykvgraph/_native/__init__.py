"""The native library: found and opened (loader), declared (ffi, generated), held (handles)."""
