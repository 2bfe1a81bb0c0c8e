"""The loss of a large vocabulary without its logits in memory."""
import torch

from tessera import _engine, arguments


def chunked_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None,
                          chunk_rows: int = 1024, ignore_index: int = -100) -> torch.Tensor:
    """The mean cross-entropy of `hidden @ weight.T + bias`, some rows of logits at a time. For any model, with or without an engine.

    The gradients are computed in the forward, while a chunk's logits are there. To rounding the same as
    `torch.nn.functional.cross_entropy`; the result has no second derivative.

    Parameters
    ----------
    hidden : torch.Tensor
        (..., dim): what goes into the output projection.
    weight : torch.Tensor
        (vocabulary, dim): the projection's, as of `torch.nn.Linear`.
    target : torch.Tensor
        (...) int64.
    bias : torch.Tensor, optional
        (vocabulary).
    chunk_rows : int
        Rows of logits that exist at once.
    ignore_index : int
        Targets of this value do not count.

    Returns
    -------
    torch.Tensor
        In fp32, a scalar; NaN where no target counts.

    Raises
    ------
    Error
        Other shapes, or `chunk_rows` below 1.
    TypeError
        An argument that is no tensor, or no int.
    """
    for name, value in (("hidden", hidden), ("weight", weight), ("target", target), ("bias", bias)):
        if not isinstance(value, torch.Tensor) and not (name == "bias" and value is None):
            raise TypeError(f"chunked_cross_entropy(): {name} is a {type(value).__name__}; expected a tensor")
    chunk_rows, ignore_index = (arguments.integer(value, f"chunked_cross_entropy(): {name}", -(2**63))
                                for name, value in (("chunk_rows", chunk_rows), ("ignore_index", ignore_index)))
    return _engine.chunked_cross_entropy(hidden, weight, target, bias, chunk_rows, ignore_index)
