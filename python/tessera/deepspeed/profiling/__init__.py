"""`deepspeed.profiling`."""
