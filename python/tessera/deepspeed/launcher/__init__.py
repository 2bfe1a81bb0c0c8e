"""`deepspeed.launcher`: ranks are started by `tessera launch`, torchrun or `accelerate launch`."""
