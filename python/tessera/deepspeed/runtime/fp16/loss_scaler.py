"""`deepspeed.runtime.fp16.loss_scaler`: the names of its configuration. The scale itself is the engine's: `optimizer.loss_scaler`."""
from tessera.deepspeed.runtime.optimizer import LossScale as LossScaleConfig

INITIAL_LOSS_SCALE, SCALE_WINDOW, DELAYED_SHIFT = "init_scale", "scale_window", "delayed_shift"
CONSECUTIVE_HYSTERESIS, MIN_LOSS_SCALE = "consecutive_hysteresis", "min_scale"

LossScalerBase = LossScaler = DynamicLossScaler = LossScaleConfig

__all__ = ["CONSECUTIVE_HYSTERESIS", "DELAYED_SHIFT", "INITIAL_LOSS_SCALE", "MIN_LOSS_SCALE", "SCALE_WINDOW", "DynamicLossScaler",
           "LossScaleConfig", "LossScaler", "LossScalerBase"]
