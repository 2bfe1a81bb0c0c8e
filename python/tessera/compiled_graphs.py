"""Announces the graphs that inductor has compiled, of which the engine would not hear otherwise.

A graph reads raw pointers. With autograd it runs inside of a function that the engine hears, with all parameters among its inputs;
without (under `torch.no_grad()`, or where nothing in it needs a gradient, as in a frozen part) it does not.
"""
import functools

from tessera import _engine


def announce():
    """From now on each of inductor's graphs gathers the parameters among its inputs, and keeps them until it has ended."""
    from torch._inductor.output_code import CompiledFxGraph

    plain = CompiledFxGraph.__call__
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def call(graph, inputs):
        with _engine.CompiledGraphRead(inputs):
            return plain(graph, inputs)

    CompiledFxGraph.__call__ = call
