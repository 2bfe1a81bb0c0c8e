"""How long a step is in the Python layer of Tessera: neither in the module's forward, nor in C++."""
import time


class Timed:
    """Stands in for an object: its methods are called through, and the time in them is added up."""

    def __init__(self, inner):
        self._inner, self.seconds = inner, 0.0

    def __getattr__(self, name):
        found = getattr(self._inner, name)
        return self.timed(found) if callable(found) else found

    def timed(self, function):
        def call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return call


def layer_ms(engine, loss_of, batches):
    """[milliseconds in the layer, of the whole] of each step. The time of this measurement itself counts as the layer's."""
    cpp, whole = Timed(engine._engine), Timed(None)
    forward = engine.module.forward
    engine._engine, engine.module.forward = cpp, cpp.timed(forward)
    calls = whole.timed(engine.forward), whole.timed(engine.backward), whole.timed(engine.step)
    found = []
    try:
        for batch in batches:
            cpp.seconds = whole.seconds = 0.0
            start = time.perf_counter()
            loss = loss_of(calls[0], batch)
            calls[1](loss)
            calls[2]()
            loss.item()
            found.append([1e3 * (whole.seconds - cpp.seconds), 1e3 * (time.perf_counter() - start)])
    finally:
        engine._engine, engine.module.forward = cpp._inner, forward
    return found
