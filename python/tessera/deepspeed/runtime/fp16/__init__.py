"""`deepspeed.runtime.fp16`."""
