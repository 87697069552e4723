"""Engine on JAX, for TPUs, GPUs and CPUs. Only this package imports jax."""
