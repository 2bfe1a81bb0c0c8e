"""The trainer's order of samples (train/task/sampler.h) in Python, so that a run of the command can be compared with a PyTorch loop."""

MASK = (1 << 64) - 1


def _mersenne_twister(seed):
    """C++'s std::mt19937_64, number by number."""
    state = [seed]
    for i in range(1, 312):
        state.append((6364136223846793005 * (state[-1] ^ (state[-1] >> 62)) + i) & MASK)
    while True:
        for i in range(312):
            x = (state[i] & (MASK << 31 & MASK)) | (state[(i + 1) % 312] & 0x7FFFFFFF)
            state[i] = state[(i + 156) % 312] ^ (x >> 1) ^ (0xB5026F5AA96619E9 if x & 1 else 0)
        for x in state:
            x ^= (x >> 29) & 0x5555555555555555
            x ^= (x << 17) & 0x71D67FFFEDA60000
            x ^= (x << 37) & 0xFFF7EEE000000000
            yield x ^ (x >> 43)


def _mix(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def shuffled_indices(size, seed, epoch):
    order = list(range(size))
    random = _mersenne_twister(_mix(_mix(seed) ^ epoch))
    for i in range(size, 1, -1):
        limit = (MASK // i) * i
        value = next(random)
        while value >= limit:
            value = next(random)
        order[i - 1], order[value % i] = order[value % i], order[i - 1]
    return order


def batches(size, batch, steps, seed=42):
    """The samples of each step, those of rank 0 first."""
    per_epoch = size // batch
    for step in range(steps):
        if step % per_epoch == 0:
            order = shuffled_indices(size, seed, step // per_epoch)
        begin = step % per_epoch * batch
        yield order[begin:begin + batch]
