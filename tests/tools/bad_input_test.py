"""Mistakes of which ranks tell each other, or that need more than a line of tests/messages: one line, and nothing stays."""
import socket
import unittest

from tool import ToolTest, free_port


class RanksTest(ToolTest):
    def setUp(self):
        super().setUp()
        self.name = self.write("config.json", self.config())

    def test_a_long_value_is_told_in_short(self):
        outcome = self.run_tool("train", self.write("long.json", self.config(model={"type": "k" * 3_000_000})))
        self.assert_one_error(outcome, "model.type", "kkk")
        self.assertLess(len(outcome.err), 10_000)

    def test_port_in_use(self):
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            port = server.getsockname()[1]
            self.assert_one_error(self.run_tool("train", self.name, "-n", "2", "--master-port", port), f"port {port}", "in use",
                                  "--master-port")
            by_hand = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            self.assert_one_error(self.run_tool("train", self.name, env=by_hand), f":{port}", "in use", "MASTER_PORT")

    def test_configurations_differ(self):
        """Ranks started by hand with other commands: the same error on both, before anything is written."""
        port = free_port()
        by_hand = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes = [self.start("train", self.name, "--set", f"seed={7 + rank}", "--set", f"trainer.max_steps={5 + rank}", env={"RANK": rank, "LOCAL_RANK": rank, **by_hand})
                     for rank in range(2)]
        for outcome in [self.finish(process) for process in processes]:
            self.assert_one_error(outcome, "seed is 7 on rank 0, but 8 on rank 1", "trainer.max_steps is 5 on rank 0, but 6 on rank 1",
                                  "expected the same on all ranks")

    def test_world_sizes_differ(self):
        for process in self.start_by_hand([2, 3], "train", self.name):
            self.assert_one_error(self.finish(process), "WORLD_SIZE differs", "2 on rank 0", "3 on rank 1")


if __name__ == "__main__":
    unittest.main()
