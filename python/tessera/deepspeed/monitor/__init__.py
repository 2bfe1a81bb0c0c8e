"""`deepspeed.monitor`."""
