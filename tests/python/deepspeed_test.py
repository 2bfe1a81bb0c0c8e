"""The Hugging Face Trainer, Accelerate and scripts of DeepSpeed train with Tessera as on DistributedDataParallel, with one line more."""
import json
import sys
import unittest

from ranks import PROGRAMS, TESSERA, RanksTest, free_port


class DeepSpeed(RanksTest):
    def run_script(self, script, *arguments, torchrun=False):
        """On two ranks; what rank 0 printed last."""
        ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()] if torchrun else \
            [TESSERA, "launch", "-n", 2, "--", sys.executable, "-B"]
        (text,) = self.finish([self.start(*ranks, PROGRAMS / script, *arguments)])
        lines = [line for line in text.splitlines() if line.startswith('{"')]
        self.assertTrue(lines, text)
        return json.loads(lines[-1])

    def assert_near(self, ours, theirs, limit, what=""):
        """Numbers in lists and dicts."""
        if isinstance(theirs, dict):
            self.assertEqual(ours.keys(), theirs.keys(), what)
            for key in theirs:
                self.assert_near(ours[key], theirs[key], limit, f"{what} {key}")
        elif isinstance(theirs, list):
            self.assertEqual(len(ours), len(theirs), what)
            for i, (one, other) in enumerate(zip(ours, theirs)):
                self.assert_near(one, other, limit, f"{what} {i}")
        elif isinstance(theirs, float):
            self.assertLessEqual(abs(ours - theirs), limit, f"{what}: {ours}, {theirs}")
        else:
            self.assertEqual(ours, theirs, what)

    def test_accelerate(self):
        plain = self.run_script("accelerate_script.py", "plain", torchrun=True)
        for stage in (1, 3):
            ours = self.run_script("accelerate_script.py", stage, torchrun=stage == 3)
            self.assert_near(ours, plain, 2e-5, f"stage {stage}")

    def test_trainer(self):
        plain = self.run_script("trainer_script.py", "plain", "plain", "train", torchrun=True)
        self.assertEqual(len(plain["log"]), 18)
        for stage, what in ((2, "cpu"), (3, "train")):
            ours = self.run_script("trainer_script.py", stage, f"stage{stage}", what)
            # Attention's key bias has a gradient of rounding noise, which Adam blows up: its sum is not compared.
            for result in (ours, plain):
                result["weights"] = {name: value for name, value in result["weights"].items() if not name.endswith("key.bias")}
            self.assert_near(ours, plain, 1e-4, f"stage {stage}")
            if stage == 3:
                resumed = self.run_script("trainer_script.py", stage, f"stage{stage}", "resume")
                last = ours["log"][12:]
                self.assert_near(resumed["log"][-len(last):], last, 1e-6, "resumed")
                self.assert_near({name: resumed["weights"][name] for name in ours["weights"]}, ours["weights"], 1e-5, "resumed")

    def test_trainer_with_the_configurations_optimizer_and_schedule(self):
        ours = self.run_script("trainer_script.py", 3, "out", "config")
        rates = [entry["learning_rate"] for entry in ours["log"] if "learning_rate" in entry]
        self.assertEqual(max(rates), 1e-3)
        self.assertLess(rates[-1], 2e-4)

    def test_a_script_of_deepspeed(self):
        (self.folder / "ds.json").write_text(json.dumps({
            "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}, "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 0.01, "warmup_type": "linear"}}}))
        result = self.run_script("deepspeed_script.py", "--deepspeed", "--deepspeed_config", "ds.json")
        self.assertLess(result["losses"][-1], result["losses"][0])
        self.assertEqual([(self.folder / f"exit{rank}").read_text() for rank in range(2)], ["False", "False"])
        self.assertEqual(result["lr"], [0.01])
        self.assertTrue((self.folder / "model" / "pytorch_model.bin").exists())


if __name__ == "__main__":
    unittest.main()
