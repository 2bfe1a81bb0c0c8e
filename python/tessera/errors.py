"""The errors of Tessera. Every message is one line: what was found, where, and what was expected."""


class Error(RuntimeError):
    """Base of the errors below; raised itself where a call is wrong, such as step() while gradients are missing."""


class ConfigError(Error, ValueError):
    """A configuration, model or optimizer that cannot be used. The message begins with the file or the key."""


class CannotBeCopied(Error, TypeError):
    """An object of one process was pickled or copied, as by `torch.save` or `copy.deepcopy`. The message names the call to use."""


class CommError(Error):
    """A collective, rendezvous or launch that failed. The message names the operation and the ranks.

    `of_peer`: another rank has ended or left the group. A rank that fails with it is not the cause.
    """

    of_peer = False


class CheckpointError(Error):
    """A checkpoint or file of weights that is missing, damaged, or does not fit the model."""


class DataError(Error):
    """Input data that is missing, truncated or of another kind."""
