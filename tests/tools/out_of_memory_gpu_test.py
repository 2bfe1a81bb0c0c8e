"""A training whose GPU has no room: one line, and an exit code that is not 0. Skipped where there is no GPU."""
import json
import unittest

from tool import NOISE, ToolTest

# Of the device's memory, for libtorch's allocator: some MB.
LITTLE_MEMORY = {"PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.0002"}


class OutOfMemoryTest(ToolTest):
    def test_ends_with_one_line(self):
        facts = json.loads(self.run_tool("doctor", "--json").out)["hosts"][0]["facts"]
        if not facts["gpus"]:
            self.skipTest(f"no GPU: {facts['no_gpu']}")
        name = self.write("config.json", self.config(
            model={"type": "fashion_mnist_cnn", "channels": 64, "hidden": 4096},
            trainer={"max_steps": 2, "output_dir": "run", "device": "cuda"}))
        outcome = self.run_tool("train", name, env=LITTLE_MEMORY)
        self.assertEqual(outcome.code, 1, outcome)
        errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
        self.assertEqual(len(errors), 1, outcome)
        self.assertIn("out of memory", errors[0], outcome)
        self.assertNotRegex(outcome.err, NOISE, outcome)
        self.assert_nothing_runs()


if __name__ == "__main__":
    unittest.main()
