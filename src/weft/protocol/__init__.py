"""The open inference protocol (KServe v2, also spoken by Triton), for server and client."""
