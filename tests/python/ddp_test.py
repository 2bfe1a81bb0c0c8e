"""Tessera beside DistributedDataParallel, on the same ranks in one script: see ddp_rank.py. Without arguments a part that takes a minute;
"full" runs all models, worlds, backends and precisions, and ends with a table: `make test-full`."""
import json
import sys
import unittest

from ranks import RanksTest

FULL = False


class BesideDdp(RanksTest):
    rows = []

    def compare(self, world, backend, models, *names, **variables):
        outputs = self.finish(self.start_ranks(world, "ddp_rank.py", backend, models, *names, **variables), timeout_s=3000)
        found = [json.loads(line[line.index('{"model"'):]) for line in outputs[0].splitlines() if '{"model"' in line]
        self.assertEqual(len(found), len(names) or len(found))
        self.assertGreater(len(found), 0, outputs[0])
        self.rows.extend(found)

    def test_two_ranks_in_shared_memory(self):
        self.compare(2, "shm", "quick", "fp32_gpt2", "fp32_timm_vit", "fp32_mixture_of_experts", "adamw_gpt2", "autocast_timm_efficientnet",
                     "bf16_gpt2")  # of the others, beside plain PyTorch: parity_rank.py

    def test_three_ranks_over_gloo(self):
        self.compare(3, "gloo", "quick", "bf16_recurrent_and_tied", "fp32_mixtral")


class Full(BesideDdp):
    """Takes the place of the quick tests."""

    test_two_ranks_in_shared_memory = test_three_ranks_over_gloo = None

    def test_all(self):
        for world, backend, models in ((1, "auto", "quick"), (2, "shm", "quick"), (2, "gloo", "quick"), (3, "gloo", "quick"), (3, "shm", "quick"),
                                       (2, "shm", "full"), (2, "gloo", "full")):
            with self.subTest(world=world, backend=backend, models=models):
                self.compare(world, backend, models, TESSERA_TEST_STAGES="0123")


def print_table(rows):
    print(f"\n{'':32}{'precision':>10} {'ranks':>8}{'loss':>10}{'norm':>10}{'weights':>10}    expected at most, loss and weights")
    for row in rows:
        numbers = "".join(f"{row['apart'][key]:10.1e}" for key in ("loss", "norm", "weights"))
        limits = " ".join("-" if row["limit"][key] is None else f"{row['limit'][key]:.1e}" for key in ("loss", "weights"))
        print(f"{row['model']:32}{row['precision']:>10} {row['world']:>3} {row['backend']:4}{numbers}    {limits}")


if __name__ == "__main__":
    FULL = "full" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "full"]
    chosen = unittest.defaultTestLoader.loadTestsFromTestCase(Full if FULL else BesideDdp)
    result = unittest.TextTestRunner(verbosity=2 if FULL else 1).run(chosen) if len(sys.argv) == 1 else unittest.main(exit=False).result
    print_table(BesideDdp.rows)
    sys.exit(not result.wasSuccessful())
