"""`deepspeed.OnDevice`."""
import torch

from tessera.errors import Error


class OnDevice:
    """Inside of the `with` tensors are made on a device, "meta" for none, and floating ones in a dtype, unless the code says otherwise.

    Parameters
    ----------
    dtype : torch.dtype
        A floating one.
    device : str or torch.device
    enabled : bool
        False: does nothing.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise Error(f"OnDevice: dtype is {dtype!r}; expected a floating one of torch")
        self.dtype, self.device, self.enabled = dtype, device, enabled

    def __enter__(self) -> "OnDevice":
        if self.enabled:
            self._before = torch.get_default_dtype()
            self._context = torch.device(self.device)
            torch.set_default_dtype(self.dtype)
            self._context.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        if self.enabled:
            self._context.__exit__(kind, error, traceback)
            torch.set_default_dtype(self._before)
