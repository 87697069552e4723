"""Open inference protocol (KServe v2, also used by Triton), for server and client."""
