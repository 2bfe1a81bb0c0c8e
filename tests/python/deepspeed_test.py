"""The Hugging Face Trainer, Accelerate and scripts of DeepSpeed train with Tessera as on DistributedDataParallel, with one line more."""
import json
import sys
import unittest

from ranks import PROGRAMS, TESSERA, RanksTest, free_port


class DeepSpeed(RanksTest):
    def found_in(self, texts):
        """What rank 0 printed last."""
        lines = [line for line in texts[0].splitlines() if line.startswith(('{"', '[{"'))]
        self.assertTrue(lines, texts[0])
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

    def test_accelerate_and_the_trainer(self):
        """One start of each library: an import of transformers takes longer than all of these trainings."""
        plain, theirs = self.found_in(self.run_ranks(2, "frameworks_script.py", "plain", "accelerate:0", "trainer:0:plain:train"))
        cpu, trained, resumed, configured, *accelerated = self.found_in(self.finish([self.start(
            sys.executable, "-B", "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port(), PROGRAMS / "frameworks_script.py", "tessera",
            "trainer:2:stage2:cpu", "trainer:3:stage3:train", "trainer:3:stage3:resume", "trainer:3:configured:config", "accelerate:1", "accelerate:3")]))
        for stage, ours in zip((1, 3), accelerated, strict=True):
            with self.subTest("Accelerate", stage=stage):
                self.assert_near(ours, plain, 2e-5)
        with self.subTest("the Trainer, resumed"):
            last = trained["log"][12:]
            self.assert_near(resumed["log"][-len(last):], last, 1e-6)
            self.assert_near({name: resumed["weights"][name] for name in trained["weights"]}, trained["weights"], 1e-5)
        # Attention's key bias has a gradient of rounding noise, which Adam blows up: its sum is not compared.
        for result in (theirs, cpu, trained):
            result["weights"] = {name: value for name, value in result["weights"].items() if not name.endswith("key.bias")}
        self.assertEqual(len(theirs["log"]), 18)
        for stage, ours in ((2, cpu), (3, trained)):
            with self.subTest("the Trainer", stage=stage):
                self.assert_near(ours, theirs, 1e-4)
        with self.subTest("the Trainer with the configuration's optimizer and schedule"):
            rates = [entry["learning_rate"] for entry in configured["log"] if "learning_rate" in entry]
            self.assertEqual(max(rates), 1e-3)
            self.assertLess(rates[-1], 2e-4)

    def test_a_script_of_deepspeed(self):
        (self.folder / "ds.json").write_text(json.dumps({
            "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}, "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 0.01, "warmup_type": "linear"}}}))
        result = self.found_in(self.finish([self.start(TESSERA, "launch", "-n", 2, "--", sys.executable, "-B", PROGRAMS / "deepspeed_script.py",
                                                        "--deepspeed", "--deepspeed_config", "ds.json")]))
        self.assertLess(result["losses"][-1], result["losses"][0])
        self.assertEqual([(self.folder / f"exit{rank}").read_text() for rank in range(2)], ["False", "False"])
        self.assertEqual(result["lr"], [0.01])
        self.assertTrue((self.folder / "model" / "pytorch_model.bin").exists())


if __name__ == "__main__":
    unittest.main()
