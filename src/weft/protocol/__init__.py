"""The open inference protocol (KServe v2, which Triton speaks), as both ends of it need it."""
