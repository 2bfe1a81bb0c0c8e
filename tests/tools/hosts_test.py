"""`tessera train` on several hosts, which are network namespaces: backend "auto" takes hybrid communication, the losses are those of one
host, what crosses is what the formula says, and a network that delays and loses packets changes no bit.

    TESSERA=build/tessera hosts_test.py
"""
import json
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
import hosts  # noqa: E402
from tool import TESSERA  # noqa: E402

NUM_STEPS, WORLD, PORT = 6, 4, 29517
SMALL_GPT = {"model.dim": 64, "model.layers": 2, "model.heads": 2, "model.vocabulary": 256, "model.sequence": 32,
             "trainer.max_steps": NUM_STEPS, "steps_per_print": 1, "trainer.device": "cpu", "comm.timeout_s": 60}


class HostsTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="tessera_hosts_", ignore_cleanup_errors=True)))
        self.machines = []
        self.addCleanup(lambda: [machine.end() for machine in self.machines])

    def make_hosts(self, count, bridged=True):
        network = len(self.machines)
        self.machines += [hosts.Host(number, network, bridged) for number in range(count)]
        return self.machines[-count:]

    def start(self, name, machines, stage, **settings):
        """Returns (the ranks' processes, their logs)."""
        words = [TESSERA, "train", ROOT / "configs" / "gpt_33m.json", "--set", f"trainer.output_dir={self.folder / name}"]
        for key, value in {**SMALL_GPT, "zero_optimization.stage": stage, **settings}.items():
            words += ["--set", f"{key}={value}"]
        logs = [self.folder / f"{name}.{rank}" for rank in range(WORLD)]
        ranks = []
        for rank, log in enumerate(logs):
            with open(log, "w", encoding="utf-8") as out:
                ranks.append(machines[rank * len(machines) // WORLD].popen(
                    words, env=hosts.rank_environment(rank, WORLD, machines, PORT), stdout=out, stderr=subprocess.STDOUT, cwd=self.folder))
        return ranks, logs

    def train(self, name, machines, stage, **settings):
        """Returns (the losses, what rank 0 said)."""
        ranks, logs = self.start(name, machines, stage, **settings)
        for process, log in zip(ranks, logs):
            self.assertEqual(process.wait(timeout=120), 0, log.read_text())
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line and "step" in line]
        return losses, logs[0].read_text()

    def bytes_of_a_step(self, machines, backend):
        """What a host receives, from runs of two lengths: what they have in common is left out."""
        received = {}
        for steps in (2, 2 + NUM_STEPS):
            before = sum(machine.received_bytes() for machine in machines)
            self.train(f"{backend}{steps}", machines, 2, **{"trainer.max_steps": steps, "comm.backend": backend})
            received[steps] = sum(machine.received_bytes() for machine in machines) - before
        return (received[2 + NUM_STEPS] - received[2]) / NUM_STEPS / len(machines)

    def test_bytes_are_the_formula(self):
        machines = self.make_hosts(2)
        # Embeddings and the output, blocks, the last norm.
        dim, layers = SMALL_GPT["model.dim"], SMALL_GPT["model.layers"]
        numel = dim * (2 * SMALL_GPT["model.vocabulary"] + SMALL_GPT["model.sequence"]) + layers * (12 * dim * dim + 13 * dim) + 2 * dim
        formula = 4 * numel * 2 * (1 - 1 / len(machines))  # fp32; a sum and a gather
        hybrid, gloo = (self.bytes_of_a_step(machines, backend) for backend in ("hybrid", "gloo"))
        print(f"a host receives {hybrid:.0f} bytes a step over hybrid, {gloo:.0f} over gloo; the formula says {formula:.0f}")
        self.assertGreater(hybrid, 0.98 * formula)
        self.assertLess(hybrid, 1.3 * formula)  # headers, norms, losses
        self.assertGreater(gloo, 1.5 * hybrid)

    def test_losses_are_those_of_one_host(self):
        one, two = self.make_hosts(1), self.make_hosts(2)
        expected, _ = self.train("one_host", one, 2)
        self.assertEqual(len(expected), NUM_STEPS)
        found = [self.train(f"hybrid{stage}", two, stage) for stage in (0, 3)]
        for losses, said in found:
            self.assertIn("backend hybrid: 4 ranks on 2 hosts", said)
            self.assertEqual(losses, found[0][0], "stages give the same bits")
            for mine, theirs in zip(losses, expected):
                self.assertAlmostEqual(mine, theirs, delta=1e-4)

    def test_a_bad_network_changes_no_bit(self):
        good, bad = self.make_hosts(2), self.make_hosts(2, bridged=False)
        relay = self.relay(bad, delay_s=0.003, loss=0.005, bytes_per_s=20e6)
        self.assertEqual(self.train("bad", bad, 3)[0], self.train("good", good, 3)[0])
        print(f"{relay.carried} packets carried, {relay.lost} lost")
        self.assertGreater(relay.lost, 10)

    def relay(self, machines, delay_s, loss, bytes_per_s):
        try:
            relay = hosts.Relay(machines, delay_s, loss, bytes_per_s)
        except OSError as error:
            self.skipTest(f"no TUN devices: {error}")
        self.addCleanup(relay.end)
        return relay

    def test_a_cut_link_is_the_reason_on_each_rank(self):
        machines = self.make_hosts(2, bridged=False)
        relay = self.relay(machines, delay_s=0, loss=0, bytes_per_s=100e6)
        ranks, logs = self.start("cut", machines, 1, **{"trainer.max_steps": 10**6, "trainer.save_every_steps": 2, "checkpoint.keep_last": 1})
        metrics = self.folder / "cut" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") > 3):
            self.assertIsNone(ranks[0].poll(), logs[0].read_text())
            time.sleep(0.05)
        relay.loss = 1.0
        for process, log in zip(ranks, logs):
            self.assertEqual(process.wait(timeout=100), 1)
            (line,) = [line for line in log.read_text().splitlines() if line.startswith("error")]
            self.assertRegex(line, "has not answered for 20 s|does not answer")

    def test_a_link_with_a_long_delay(self):
        far = self.make_hosts(2, bridged=False)
        self.relay(far, delay_s=0.1, loss=0, bytes_per_s=100e6)
        losses, _ = self.train("far", far, 2, **{"trainer.max_steps": 3})
        self.assertEqual(len(losses), 3)


if __name__ == "__main__":
    hosts.own_network()
    unittest.main(verbosity=2)
